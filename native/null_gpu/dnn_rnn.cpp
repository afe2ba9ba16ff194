// Recurrent networks, batch normalization and CTC losses of cuDNN on the null GPU: sizes follow rules,
// computing does nothing. Descriptors of tensors are the real library's.
#include <dlfcn.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "null_gpu/abi.hpp"
#include "null_gpu/order.hpp"
#include "null_gpu/profile.hpp"
#include "null_gpu/rules.hpp"

using namespace vram::null_gpu;

namespace {

using Descriptor = void*;
constexpr int kOk = 0;
constexpr int kBadParameter = 2000;
constexpr int kMostDimensions = 8;

std::uint64_t element_bytes(int type) {
  switch (type) {  // cudnnDataType_t
    case 1:
      return 8;
    case 2:
    case 9:
      return 2;
    default:
      return 4;
  }
}

struct Extents {
  int type = 0;
  int count = 0;
  int sizes[kMostDimensions] = {};
  int strides[kMostDimensions] = {};
  std::uint64_t elements() const {
    std::uint64_t product = 1;
    for (int i = 0; i < count; ++i) product *= static_cast<std::uint64_t>(sizes[i]);
    return product;
  }
};

template <typename Function>
Function real(const char* name) {
  static void* const library = dlopen("libcudnn.so.9", RTLD_LAZY | RTLD_NOLOAD);
  return reinterpret_cast<Function>(dlsym(library, name));
}
Extents extents_of(Descriptor tensor) {
  static const auto get =
      real<int (*)(Descriptor, int, int*, int*, int*, int*)>("cudnnGetTensorNdDescriptor");
  Extents extents;
  get(tensor, kMostDimensions, &extents.type, &extents.count, extents.sizes, extents.strides);
  return extents;
}
int set_matrix(Descriptor tensor, int type, std::uint64_t rows, std::uint64_t columns) {
  static const auto set =
      real<int (*)(Descriptor, int, int, const int*, const int*)>("cudnnSetTensorNdDescriptor");
  const int sizes[] = {1, static_cast<int>(rows), static_cast<int>(columns)};
  const int strides[] = {sizes[1] * sizes[2], sizes[2], 1};
  return set(tensor, type, 3, sizes, strides);
}

int make(Descriptor* out) {
  *out = new_handle();
  return kOk;
}

// What was set by descriptor: of networks, and of their data.
std::mutex mutex;
struct Network {
  RnnShape shape{};
  int type = 0;
  bool biases = true;
};
struct Data {
  std::uint64_t tokens, batch;
};
template <typename Value>
std::unordered_map<Descriptor, Value>& known() {
  static auto* const made = new std::unordered_map<Descriptor, Value>;
  return *made;
}
template <typename Value>
bool find(Descriptor descriptor, Value* out) {
  const std::lock_guard lock(mutex);
  const auto found = known<Value>().find(descriptor);
  if (found != known<Value>().end()) *out = found->second;
  return found != known<Value>().end();
}
template <typename Value>
void keep(Descriptor descriptor, const Value& value) {
  const std::lock_guard lock(mutex);
  known<Value>().insert_or_assign(descriptor, value);
}
template <typename Value>
int forget(Descriptor descriptor) {
  const std::lock_guard lock(mutex);
  known<Value>().erase(descriptor);
  return kOk;
}

}  // namespace

// ---- recurrent networks ---------------------------------------------------------------------------------

VRAM_NULL_API int cudnnCreateRNNDescriptor(Descriptor* out) { return make(out); }
VRAM_NULL_API int cudnnDestroyRNNDescriptor(Descriptor descriptor) { return forget<Network>(descriptor); }
VRAM_NULL_API int cudnnCreateRNNDataDescriptor(Descriptor* out) { return make(out); }
VRAM_NULL_API int cudnnDestroyRNNDataDescriptor(Descriptor descriptor) { return forget<Data>(descriptor); }
VRAM_NULL_API int cudnnSetRNNDescriptor_v8(Descriptor descriptor, int, int mode, int bias, int direction, int,
                                           int type, int, int, int input, int hidden, int projected,
                                           int layers, Descriptor, unsigned) {
  const auto size = [](int value) { return static_cast<std::uint64_t>(value); };
  RnnShape shape{mode,         direction != 0,  size(layers),       0, 0, size(input),
                 size(hidden), size(projected), element_bytes(type)};
  keep(descriptor, Network{shape, type, bias != 0});
  return kOk;
}
VRAM_NULL_API int cudnnSetRNNDataDescriptor(Descriptor descriptor, int, int layout, int steps, int batch, int,
                                            const int* lengths, void*) {
  constexpr int kPacked = 1;  // shorter sequences take less room
  std::uint64_t tokens = 0;
  for (int i = 0; i < batch; ++i)
    tokens += static_cast<std::uint64_t>(layout == kPacked && lengths != nullptr ? lengths[i] : steps);
  keep(descriptor, Data{tokens, static_cast<std::uint64_t>(batch)});
  return kOk;
}
VRAM_NULL_API int cudnnGetRNNWeightSpaceSize(Handle, Descriptor descriptor, std::size_t* bytes) {
  Network network;
  if (!find(descriptor, &network)) return kBadParameter;
  *bytes = rnn_weights(network.shape);
  return kOk;
}
VRAM_NULL_API int cudnnGetRNNTempSpaceSizes(Handle, Descriptor descriptor, int training, Descriptor data,
                                            std::size_t* workspace, std::size_t* reserve) {
  Network network;
  Data extents;
  if (!find(descriptor, &network) || !find(data, &extents)) return kBadParameter;
  network.shape.tokens = extents.tokens;
  network.shape.batch = extents.batch;
  if (workspace != nullptr) *workspace = rnn_workspace(network.shape);
  if (reserve != nullptr) *reserve = training != 0 ? rnn_reserve(network.shape) : 0;
  return kOk;
}
// Where the weights of a gate lie. All matrices come first, layer by layer, then all biases.
VRAM_NULL_API int cudnnGetRNNWeightParams(Handle, Descriptor descriptor, int pseudo_layer, std::size_t,
                                          const void* weights, int gate, Descriptor matrix, void** matrix_at,
                                          Descriptor bias, void** bias_at) {
  Network network;
  if (!find(descriptor, &network)) return kBadParameter;
  const RnnShape& shape = network.shape;
  const std::uint64_t gates = shape.gates(), ways = shape.ways();
  const auto inputs = [&](std::uint64_t layer) { return layer == 0 ? shape.input : shape.projected * ways; };
  const std::uint64_t projection = shape.projected != shape.hidden ? shape.projected * shape.hidden : 0;
  const auto matrices = [&](std::uint64_t layer) {
    return gates * shape.hidden * (inputs(layer) + shape.projected) + projection;
  };
  std::uint64_t before = 0, all = 0;  // elements
  for (std::uint64_t i = 0; i < shape.layers * ways; ++i) {
    if (i < static_cast<std::uint64_t>(pseudo_layer)) before += matrices(i / ways);
    all += matrices(i / ways);
  }
  const std::uint64_t input = inputs(static_cast<std::uint64_t>(pseudo_layer) / ways);
  const auto number = static_cast<std::uint64_t>(gate);
  const bool recurrent = number >= gates, projects = number >= 2 * gates;
  const bool has_matrix = !projects || projection != 0, has_bias = network.biases && !projects;
  const std::uint64_t columns = projects ? shape.hidden : recurrent ? shape.projected : input;
  const std::uint64_t rows = projects ? shape.projected : shape.hidden;
  before += std::min(number, gates) * shape.hidden * input;
  if (recurrent) before += std::min(number - gates, gates) * shape.hidden * shape.projected;
  const auto* const begin = static_cast<const char*>(weights);
  const auto at = [&](std::uint64_t element) {
    return const_cast<char*>(begin + element * shape.element_bytes);
  };
  // The caller passes null for what it does not ask for.
  if (matrix_at != nullptr) *matrix_at = has_matrix ? at(before) : nullptr;
  if (bias_at != nullptr)
    *bias_at = has_bias
                   ? at(all + (static_cast<std::uint64_t>(pseudo_layer) * 2 * gates + number) * shape.hidden)
                   : nullptr;
  int status = kOk;
  if (matrix != nullptr && has_matrix) status = set_matrix(matrix, network.type, rows, columns);
  if (status == kOk && bias != nullptr && has_bias) status = set_matrix(bias, network.type, shape.hidden, 1);
  return status;
}

// ---- dropout --------------------------------------------------------------------------------------------

VRAM_NULL_API int cudnnCreateDropoutDescriptor(Descriptor* out) { return make(out); }
VRAM_NULL_API int cudnnDestroyDropoutDescriptor(Descriptor) { return kOk; }
VRAM_NULL_API int cudnnSetDropoutDescriptor(...) { return kOk; }
VRAM_NULL_API int cudnnRestoreDropoutDescriptor(...) { return kOk; }
VRAM_NULL_API int cudnnDropoutGetStatesSize(Handle, std::size_t* bytes) {
  constexpr std::size_t kBytesOfProcessor = 49152;
  *bytes = kBytesOfProcessor * static_cast<std::size_t>(Profile::get().multiprocessors);
  return kOk;
}

// ---- batch normalization --------------------------------------------------------------------------------

namespace {

constexpr int kPersistent = 2;  // CUDNN_BATCHNORM_SPATIAL_PERSISTENT

int norm(int mode, Descriptor tensor, bool forward, std::size_t* bytes) {
  const Extents extents = extents_of(tensor);
  const auto channels = static_cast<std::uint64_t>(extents.count > 1 ? extents.sizes[1] : 0);
  *bytes = mode == kPersistent && channels != 0
               ? norm_workspace(extents.elements() / channels, channels, forward, element_bytes(extents.type))
               : 0;
  return kOk;
}

}  // namespace

VRAM_NULL_API int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(Handle, int mode, int,
                                                                           Descriptor input, Descriptor,
                                                                           Descriptor, Descriptor, Descriptor,
                                                                           std::size_t* bytes) {
  return norm(mode, input, true, bytes);
}
VRAM_NULL_API int cudnnGetBatchNormalizationBackwardExWorkspaceSize(Handle, int mode, int, Descriptor input,
                                                                    Descriptor, Descriptor, Descriptor,
                                                                    Descriptor, Descriptor, Descriptor,
                                                                    std::size_t* bytes) {
  return norm(mode, input, false, bytes);
}
VRAM_NULL_API int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(Handle, int, int, Descriptor,
                                                                       Descriptor, std::size_t* bytes) {
  *bytes = 0;
  return kOk;
}

// ---- CTC losses -----------------------------------------------------------------------------------------

namespace {

int ctc(Descriptor probabilities, std::size_t* bytes) {
  const Extents extents = extents_of(probabilities);
  *bytes = extents.elements() * element_bytes(extents.type);
  return kOk;
}

}  // namespace

VRAM_NULL_API int cudnnGetCTCLossWorkspaceSize(Handle, Descriptor probabilities, Descriptor, const int*,
                                               const int*, const int*, int, Descriptor, std::size_t* bytes) {
  return ctc(probabilities, bytes);
}
VRAM_NULL_API int cudnnGetCTCLossWorkspaceSize_v8(Handle, int, Descriptor, Descriptor probabilities,
                                                  Descriptor, std::size_t* bytes) {
  return ctc(probabilities, bytes);
}
