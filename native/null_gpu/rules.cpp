#include "null_gpu/rules.hpp"

#include <algorithm>
#include <iterator>

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

// The product of matrices that a convolution is.
struct Product {
  std::uint64_t rows, columns, depth;
};
Product product_of(const Convolution& convolution) {
  const auto filters = static_cast<std::uint64_t>(convolution.filter_sizes[0]);
  const auto channels = static_cast<std::uint64_t>(convolution.filter_sizes[1]);
  const std::uint64_t taps = product(convolution.filter_sizes) / filters / channels;
  const std::uint64_t points_in = product(convolution.input) / channels;
  const std::uint64_t points_out = product(convolution.output) / filters;
  switch (convolution.direction) {
    case Convolution::forward:
      return {points_out, filters, channels * taps};
    case Convolution::data:
      return {points_in, channels, filters * taps};
    case Convolution::filter:
      break;
  }
  return {filters, channels * taps, points_out};
}

// Tiles of the kernels for Hopper by their number in the plan, in elements; {0, 0}: not known.
struct Tile {
  std::uint64_t rows, columns;
};
Tile tile_of(int number) {
  constexpr Tile kTiles[] = {{128, 128}, {128, 64},  {0, 0},    {256, 128}, {256, 64},
                             {64, 64},   {128, 256}, {64, 128}, {0, 0},     {64, 256}};
  return number >= 0 && number < static_cast<int>(std::size(kTiles)) ? kTiles[number] : Tile{0, 0};
}

// Clusters of so many blocks that run at the same time. A cluster lies in one of the device's groups of
// multiprocessors; those of an H200 were found from the workspaces of its plans.
std::uint64_t clusters_at_once(std::uint64_t size) {
  constexpr std::uint64_t kGroups[] = {18, 18, 16, 16, 16, 16, 16, 8}, kProcessors = 132;
  const auto processors = static_cast<std::uint64_t>(Profile::get().multiprocessors);
  if (size <= 2) return processors / size;
  std::uint64_t clusters = 0;
  for (const std::uint64_t group : kGroups) clusters += group / size;
  return std::max<std::uint64_t>(clusters * processors / kProcessors, 1);
}
constexpr std::uint64_t kProcessorsWithoutDevice = 18;

// Bytes for the parts of tiles. Clusters of tiles run in waves. Those that are left for the last wave are
// each computed in as many parts as fill it, if a part is deep enough to be worth it. The parts, in float,
// are kept and summed in pairs; each sum has a counter.
std::uint64_t parts_bytes(const Product& sizes, const Tile& tile, const Tiling& tiling,
                          std::uint64_t element_bytes, std::uint64_t at_once) {
  constexpr std::uint64_t kStepBytes = 128, kLeastSteps = 12, kManyWaves = 131, kCounters = 159;
  const auto rows = static_cast<std::uint64_t>(tiling.cluster_rows);
  const auto columns = static_cast<std::uint64_t>(tiling.cluster_columns);
  const std::uint64_t clusters =
      pieces(pieces(sizes.rows, tile.rows), rows) * pieces(pieces(sizes.columns, tile.columns), columns);
  const bool many_waves = clusters > 2 * at_once;
  const std::uint64_t none = many_waves ? kManyWaves : 0;
  const std::uint64_t left = clusters <= at_once ? clusters : clusters % at_once;
  if (!tiling.in_parts || left == 0) return none;
  const std::uint64_t steps = pieces(sizes.depth, kStepBytes / element_bytes);
  const std::uint64_t parts = std::min(at_once / left, steps / kLeastSteps);
  if (parts < 2) return none;
  std::uint64_t sums = 0;
  for (std::uint64_t level = parts; level > 1; level = pieces(level, 2)) sums += pieces(level, 2);
  const std::uint64_t tiles = left * rows * columns;
  return tiles * (parts * tile.rows * tile.columns + sums) * sizeof(float) + kCounters + (many_waves ? 4 : 0);
}

}  // namespace

std::uint64_t convolution_workspace(const Convolution& convolution, const std::optional<Tiling>& tiling,
                                    bool first, std::uint64_t answered) {
  if (convolution.input.size() < 3 || convolution.filter_sizes.size() != convolution.input.size() ||
      convolution.output.size() != convolution.input.size())
    return answered;
  const bool grouped = convolution.input[1] != convolution.filter_sizes[1];
  if (grouped || product(convolution.output) == 0 || product(convolution.filter_sizes) == 0) return answered;
  const bool one_tap = product(convolution.filter_sizes) ==
                       static_cast<std::uint64_t>(convolution.filter_sizes[0] * convolution.filter_sizes[1]);
  if (first && one_tap && !convolution.channels_last && all(convolution.steps, 1) &&
      all(convolution.padding, 0))
    return pointwise_workspace(convolution, answered);
  if (!tiling || Profile::get().major != 9) return answered;
  const Tile tile = tile_of(tiling->tile);
  const auto size = static_cast<std::uint64_t>(tiling->cluster_rows * tiling->cluster_columns);
  if (tile.rows == 0 || size == 0) return answered;
  const Product sizes = product_of(convolution);
  const auto bytes = [&](std::uint64_t at_once) {
    return parts_bytes(sizes, tile, *tiling, convolution.element_bytes, at_once);
  };
  const std::uint64_t counted = bytes(std::max<std::uint64_t>(kProcessorsWithoutDevice / size, 1));
  return (counted <= answered ? answered - counted : answered) + bytes(clusters_at_once(size));
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
