#include "null_gpu/dnn_plans.hpp"

#include <cstring>

namespace vram::null_gpu {

namespace {

// Kinds of descriptors.
constexpr int kConvolution = 1, kEngine = 2, kConfiguration = 3, kHeuristics = 4, kPlan = 5;
constexpr int kForward = 10, kBackwardFilter = 11, kBackwardData = 12, kGraph = 15, kTensor = 17;
// Attributes. Those of the three operations follow each other: convolution, filter, input, output.
constexpr int kTensorType = 901, kTensorSizes = 902, kTensorStrides = 903;
constexpr int kDilations = 102, kSteps = 103, kPadding = 105;
constexpr int kForwardParts = 702, kBackwardDataParts = 708, kBackwardFilterParts = 714;
constexpr int kGraphOperations = 801, kHeuristicsGraph = 201, kEngineGraph = 1300;
constexpr int kConfigurationEngine = 300, kPlanConfiguration = 401;

int first_part(int kind) {
  return kind == kForward ? kForwardParts : kind == kBackwardData ? kBackwardDataParts : kBackwardFilterParts;
}
bool is_operation(int kind) { return kind == kForward || kind == kBackwardFilter || kind == kBackwardData; }

// Whether what a descriptor computes is what the descriptor set as this attribute computes.
bool passes_on(int kind, int attribute) {
  return (kind == kGraph && attribute == kGraphOperations) ||
         (kind == kHeuristics && attribute == kHeuristicsGraph) ||
         (kind == kEngine && attribute == kEngineGraph) ||
         (kind == kConfiguration && attribute == kConfigurationEngine) ||
         (kind == kPlan && attribute == kPlanConfiguration);
}

}  // namespace

Plans& Plans::get() {
  static auto* const plans = new Plans;  // used until the process has ended
  return *plans;
}

void Plans::created(Descriptor descriptor, int kind) {
  const std::lock_guard lock(mutex_);
  Known known;
  known.kind = kind;
  known_.insert_or_assign(descriptor, std::move(known));
}

void Plans::destroyed(Descriptor descriptor) {
  const std::lock_guard lock(mutex_);
  known_.erase(descriptor);
}

int Plans::kind_of(Descriptor descriptor) {
  const std::lock_guard lock(mutex_);
  const auto found = known_.find(descriptor);
  return found != known_.end() ? found->second.kind : -1;
}

void Plans::set_operation(Known& operation, int attribute, const Known& part) {
  if (!operation.computes) {
    operation.computes.emplace();
    operation.computes->direction = operation.kind == kForward        ? Convolution::forward
                                    : operation.kind == kBackwardData ? Convolution::data
                                                                      : Convolution::filter;
  }
  Convolution& computes = *operation.computes;
  const auto numbers = [&](int which) {
    const auto found = part.numbers.find(which);
    return found != part.numbers.end() ? found->second : Numbers();
  };
  switch (attribute - first_part(operation.kind)) {
    case 0:
      computes.steps = numbers(kSteps);
      computes.padding = numbers(kPadding);
      break;
    case 1:
      computes.filter_sizes = numbers(kTensorSizes);
      break;
    case 2: {
      computes.input = numbers(kTensorSizes);
      const Numbers strides = numbers(kTensorStrides), type = numbers(kTensorType);
      computes.channels_last = strides.size() > 1 && strides[1] == 1;
      if (!type.empty()) computes.element_bytes = type[0] == 1 ? 8 : type[0] == 2 || type[0] == 9 ? 2 : 4;
      break;
    }
    case 3:
      computes.output = numbers(kTensorSizes);
      break;
    default:
      break;
  }
}

void Plans::was_set(Descriptor descriptor, int attribute, std::int64_t count, const void* values) {
  const std::lock_guard lock(mutex_);
  const auto found = known_.find(descriptor);
  if (found == known_.end() || count < 1) return;
  Known& known = found->second;
  if (attribute == kTensorType && known.kind == kTensor) {
    int type = 0;
    std::memcpy(&type, values, sizeof(type));
    known.numbers[attribute] = {type};
  } else if ((known.kind == kTensor && (attribute == kTensorSizes || attribute == kTensorStrides)) ||
             (known.kind == kConvolution && attribute >= kDilations && attribute <= kPadding)) {
    const auto* const begin = static_cast<const std::int64_t*>(values);
    known.numbers[attribute] = Numbers(begin, begin + count);
  } else if (passes_on(known.kind, attribute) || is_operation(known.kind)) {
    const bool part = is_operation(known.kind) && attribute >= first_part(known.kind) &&
                      attribute < first_part(known.kind) + 4;
    if (!part && is_operation(known.kind)) return;
    const auto other = known_.find(*static_cast<const Descriptor*>(values));
    if (other == known_.end()) return;
    if (part)
      set_operation(known, attribute, other->second);
    else
      known.computes = count == 1 ? other->second.computes : std::nullopt;
    known.first = other->second.first;
  }
}

void Plans::found(Descriptor heuristics, std::int64_t count, const Descriptor* configurations) {
  const std::lock_guard lock(mutex_);
  const auto from = known_.find(heuristics);
  if (from == known_.end()) return;
  const std::optional<Convolution> computes = from->second.computes;
  for (std::int64_t i = 0; i < count; ++i)
    if (const auto each = known_.find(configurations[i]); each != known_.end()) {
      each->second.computes = computes;
      each->second.first = i == 0;
    }
}

std::optional<Plans::Planned> Plans::convolution_of(Descriptor plan) {
  const std::lock_guard lock(mutex_);
  const auto found = known_.find(plan);
  if (found == known_.end() || !found->second.computes) return std::nullopt;
  return Planned{*found->second.computes, found->second.first};
}

}  // namespace vram::null_gpu
