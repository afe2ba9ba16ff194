#include "null_gpu/rules.hpp"

#include <algorithm>

#include "null_gpu/profile.hpp"

namespace vram::null_gpu {

// ---- recurrent networks ---------------------------------------------------------------------------------

std::uint64_t rnn_weights(const RnnShape& shape) {
  std::uint64_t elements = 0;
  for (std::uint64_t layer = 0; layer < shape.layers; ++layer) {
    const std::uint64_t input = layer == 0 ? shape.input : shape.projected * shape.ways();
    const std::uint64_t projection = shape.projected != shape.hidden ? shape.projected * shape.hidden : 0;
    elements += shape.ways() * (shape.gates() * shape.hidden * (input + shape.projected + 2) + projection);
  }
  return elements * shape.element_bytes;
}

namespace {

// Bytes of what one layer computes over all steps, both ways.
std::uint64_t activations(const RnnShape& shape) {
  return shape.tokens * shape.hidden * shape.element_bytes * shape.ways();
}

}  // namespace

// Every layer keeps its gates and states, and all but the last what they pass on.
std::uint64_t rnn_reserve(const RnnShape& shape) {
  const std::uint64_t kept = shape.mode == 2 ? 5 : shape.mode == 3 ? 6 : 1;
  return activations(shape) * (kept * shape.layers + shape.layers - 1) + 256;
}

std::uint64_t rnn_workspace(const RnnShape& shape) {
  struct Shares {
    double weights, one_way, both_ways, input;
  };
  const Shares shares = shape.mode == 2   ? Shares{1, 5.1, 6.8, 1}
                        : shape.mode == 3 ? Shares{1, 4.2, 5.75, 1.5}
                                          : Shares{2.7, 4.45, 5.65, 0.85};
  constexpr double kMultiplication = 8 << 20;  // bytes for the matrix products of a layer and direction
  const double each = static_cast<double>(shape.layers * shape.ways());
  const double step = static_cast<double>(shape.batch * shape.hidden * shape.element_bytes);
  const double input = static_cast<double>(shape.tokens * shape.input * shape.element_bytes);
  const double bytes =
      kMultiplication * each + shares.weights * static_cast<double>(rnn_weights(shape)) +
      (shape.both_ways ? shares.both_ways : shares.one_way) * static_cast<double>(activations(shape)) +
      10 * each * step + shares.input * input * static_cast<double>(shape.ways());
  return static_cast<std::uint64_t>(bytes);
}

// ---- convolutions ---------------------------------------------------------------------------------------

namespace {

std::uint64_t product(const std::vector<std::int64_t>& sizes) {
  std::uint64_t result = 1;
  for (const std::int64_t each : sizes) result *= static_cast<std::uint64_t>(each);
  return result;
}
std::uint64_t pieces(std::uint64_t whole, std::uint64_t piece) { return (whole + piece - 1) / piece; }

bool all(const std::vector<std::int64_t>& numbers, std::int64_t value) {
  return std::all_of(numbers.begin(), numbers.end(), [=](std::int64_t each) { return each == value; });
}

// A 1×1 filter that is applied everywhere: a product of matrices for every image.
std::uint64_t pointwise_workspace(const Convolution& convolution, std::uint64_t answered) {
  if (convolution.direction != Convolution::filter) return convolution.element_bytes == 4 ? 400 : 272;
  const std::uint64_t gradients =
      static_cast<std::uint64_t>(convolution.input[0]) * product(convolution.filter_sizes) * sizeof(float);
  return 2 * gradients <= 3 * answered ? gradients : answered;
}

// How many parts of a filter's gradient, in float, are kept to be summed: tiles of 128 by 128 channels and
// one tap are computed in as many parts as fill the device.
double gradient_parts(const Convolution& convolution, std::uint64_t filters, std::uint64_t channels) {
  constexpr std::uint64_t kTile = 128, kMostParts = 16;
  const bool single = convolution.element_bytes == 4;
  const std::uint64_t taps = product(convolution.filter_sizes) / filters / channels;
  const std::uint64_t tiles = pieces(filters, kTile) * pieces(channels, kTile) * taps;
  const std::uint64_t depth = product(convolution.output) / static_cast<std::uint64_t>(convolution.output[1]);
  const std::uint64_t least_depth = single ? 1024 : 4096;  // of a part
  const auto processors = static_cast<std::uint64_t>(Profile::get().multiprocessors);
  const std::uint64_t parts = std::min({processors / tiles, depth / least_depth, kMostParts});
  if (parts >= 2)
    return static_cast<double>(single ? parts : parts - 1);  // else the first is the result itself
  return single ? std::min(0.92, static_cast<double>(processors) / static_cast<double>(tiles)) : 0;
}

std::uint64_t filter_workspace(const Convolution& convolution, std::uint64_t filters,
                               std::uint64_t channels) {
  // In the layout with channels first, input, gradients and result are transformed.
  const std::uint64_t transformed =
      convolution.channels_last
          ? 0
          : (product(convolution.input) + product(convolution.output) + product(convolution.filter_sizes)) *
                    convolution.element_bytes +
                16;
  const auto part = static_cast<double>(product(convolution.filter_sizes) * sizeof(float));
  return transformed + static_cast<std::uint64_t>(gradient_parts(convolution, filters, channels) * part);
}

}  // namespace

std::uint64_t convolution_workspace(const Convolution& convolution, std::uint64_t answered) {
  if (convolution.input.size() < 3 || convolution.filter_sizes.size() != convolution.input.size() ||
      convolution.output.size() != convolution.input.size())
    return answered;
  const auto filters = static_cast<std::uint64_t>(convolution.filter_sizes[0]);
  const auto channels = static_cast<std::uint64_t>(convolution.filter_sizes[1]);
  const bool grouped = convolution.input[1] != convolution.filter_sizes[1];
  const bool one_tap = product(convolution.filter_sizes) == filters * channels;
  if (grouped || product(convolution.output) == 0 || product(convolution.filter_sizes) == 0) return answered;
  if (one_tap && !convolution.channels_last && all(convolution.steps, 1) && all(convolution.padding, 0))
    return pointwise_workspace(convolution, answered);
  const std::uint64_t aligned = 16 / convolution.element_bytes;
  constexpr std::uint64_t kLeastChannels = 32;  // fewer are padded; then the library's answer is right
  if (convolution.direction != Convolution::filter || filters % aligned != 0 || channels % aligned != 0 ||
      channels < kLeastChannels)
    return answered;
  return filter_workspace(convolution, filters, channels);
}

// ---- normalization --------------------------------------------------------------------------------------

// Blocks of so many rows by a tile of channels keep two sums of each channel; all blocks and tiles are
// counted.
std::uint64_t norm_workspace(std::uint64_t rows, std::uint64_t channels, bool forward,
                             std::uint64_t element_bytes) {
  if (element_bytes > 4 || channels == 0) return 0;
  const std::uint64_t tile = channels % 4 == 0 ? 64 : channels < 4 ? 4 : 16;
  const std::uint64_t rows_of_block =
      (forward ? element_bytes == 4 ? 64 : 160 : 96) * (tile == 4 ? std::uint64_t{4} : 1);
  const std::uint64_t tiles = pieces(channels, tile), blocks = tiles * pieces(rows, rows_of_block);
  const std::uint64_t sums = 2 * tile * sizeof(float);
  const std::uint64_t counted = (forward ? blocks + tiles : tiles) * sizeof(int);
  return blocks * sums + counted + (forward ? 1072 : 1056);
}

// ---- Fourier transforms ---------------------------------------------------------------------------------

namespace {

constexpr std::int64_t kOneKernelPowerOfTwo = 16384, kOneKernel = 8192, kOneKernelPrime = 4096;

std::int64_t largest_factor(std::int64_t number) {
  std::int64_t largest = 1;
  for (std::int64_t factor = 2; factor * factor <= number; ++factor)
    while (number % factor == 0) {
      largest = std::max(largest, factor);
      number /= factor;
    }
  return std::max(largest, number);
}

}  // namespace

// An extent that one kernel transforms needs no workspace; a longer one needs a copy of the data, and one
// with a large prime factor the padded data of a convolution.
std::uint64_t fft_workspace(int rank, const std::int64_t* extents, std::uint64_t batch,
                            std::uint64_t element_bytes, bool real) {
  std::uint64_t bytes = batch * element_bytes;
  double copies = 0;
  for (int i = 0; i < rank; ++i) {
    const std::int64_t extent = extents[i];
    bytes *= static_cast<std::uint64_t>(extent);
    const std::int64_t factor = largest_factor(extent);
    if (factor > 127 && extent > kOneKernelPrime)
      copies = std::max(copies, real ? 2.5 : 4.0);
    else if (extent > (factor == 2 ? kOneKernelPowerOfTwo : kOneKernel))
      copies = std::max(copies, real ? 0.5 : 1.0);
  }
  return static_cast<std::uint64_t>(copies * static_cast<double>(bytes));
}

// ---- linear algebra -------------------------------------------------------------------------------------

namespace solver {

std::uint64_t lu(std::uint64_t m, std::uint64_t n) { return 64 + 4 * std::max(m, n); }
std::uint64_t cholesky(std::uint64_t n) { return 32 + n * n / 1024; }
std::uint64_t qr(std::uint64_t n) { return std::max<std::uint64_t>(786432, 524288 + 1024 * n); }
std::uint64_t q_of_qr(std::uint64_t m, std::uint64_t n) { return 32768 + 256 * n + 128 * m; }
std::uint64_t svd(std::uint64_t m, std::uint64_t n) {
  const std::uint64_t least = std::min(m, n);
  return 65536 + 300 * least + 3 * least * least + (m != n ? qr(least) + m * n : 0);
}
std::uint64_t svd_jacobi(std::uint64_t m, std::uint64_t n) {
  const std::uint64_t least = std::min(m, n);
  return 3072 + 64 * least + 2 * least * least + (m != n ? 786432 : 0);
}
std::uint64_t svd_approximate(std::uint64_t m, std::uint64_t n, std::uint64_t batch) {
  const std::uint64_t least = std::min(m, n);
  return least <= 32 ? batch * 270 * least : batch * (204800 + 300 * least + 10 * least * least + 4 * m * n);
}
std::uint64_t eigen(std::uint64_t n) { return 65536 + 512 * n + 4 * n * n; }
std::uint64_t eigen_jacobi(std::uint64_t n, std::uint64_t batch) { return 2048 + batch * (n * n + 32 * n); }

}  // namespace solver

}  // namespace vram::null_gpu
