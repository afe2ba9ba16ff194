// Sizes of workspaces that the libraries would answer with a device, as rules measured on an H200 with
// CUDA 13.0 and cuDNN 9.19 (docs/internals/null_gpu.md). They are exact where the docs say so, else
// approximate.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace vram::null_gpu {

struct RnnShape {
  int mode;  // cudnnRNNMode_t: 0 and 1 plain, 2 LSTM, 3 GRU
  bool both_ways;
  std::uint64_t layers, tokens, batch, input, hidden, projected, element_bytes;  // tokens: of all sequences

  std::uint64_t ways() const { return both_ways ? 2 : 1; }
  std::uint64_t gates() const { return mode == 2 ? 4 : mode == 3 ? 3 : 1; }
};
std::uint64_t rnn_weights(const RnnShape& shape);    // bytes; exact
std::uint64_t rnn_reserve(const RnnShape& shape);    // within 1 %
std::uint64_t rnn_workspace(const RnnShape& shape);  // within 10 %

// A convolution: sizes with batch and channels first, whatever the layout.
struct Convolution {
  enum Direction { forward, data, filter };
  Direction direction = forward;
  std::vector<std::int64_t> input, filter_sizes, output, steps, padding;
  std::uint64_t element_bytes = 4;
  bool channels_last = false;
};
// How a plan cuts the product of matrices that a convolution is: which tiles, how many of them go together on
// neighbouring multiprocessors, and whether tiles that do not fill the device may be computed in parts.
struct Tiling {
  int tile, cluster_rows, cluster_columns;
  bool in_parts;
};
// cuDNN answers without a device, too, but then parts fill the 18 multiprocessors of one cluster of
// processors. This is what it answers with the whole device. `first`: the plan is the first that the
// heuristics offer, before which the real library offers products of matrices for 1×1 filters.
std::uint64_t convolution_workspace(const Convolution& convolution, const std::optional<Tiling>& tiling,
                                    bool first, std::uint64_t answered);

// Persistent batch normalization, which is for channels last: `rows` of `channels` elements. The other kind
// and elements of 8 bytes need none. Exact.
std::uint64_t norm_workspace(std::uint64_t rows, std::uint64_t channels, bool forward,
                             std::uint64_t element_bytes);

// A Fourier transform of `batch` arrays of `rank` extents.
std::uint64_t fft_workspace(int rank, const std::int64_t* extents, std::uint64_t batch,
                            std::uint64_t element_bytes, bool real);

// Elements of workspace of factorizations of m×n matrices; `batch` of them where they go together.
namespace solver {
std::uint64_t lu(std::uint64_t m, std::uint64_t n);
std::uint64_t cholesky(std::uint64_t n);
std::uint64_t qr(std::uint64_t n);
std::uint64_t q_of_qr(std::uint64_t m, std::uint64_t n);
std::uint64_t svd(std::uint64_t m, std::uint64_t n);
std::uint64_t svd_jacobi(std::uint64_t m, std::uint64_t n);
std::uint64_t svd_approximate(std::uint64_t m, std::uint64_t n, std::uint64_t batch);
std::uint64_t eigen(std::uint64_t n);
std::uint64_t eigen_jacobi(std::uint64_t n, std::uint64_t batch);
}  // namespace solver

}  // namespace vram::null_gpu
