// cuBLAS and cuBLASLt of the null GPU: what returns something. Everything else there does nothing
// (unknown.cpp). Work is not done, so workspaces that PyTorch itself allocates are all that counts.
#include <cstring>

#include "null_gpu/abi.hpp"
#include "null_gpu/order.hpp"

using namespace vram::null_gpu;

VRAM_NULL_API int cublasCreate_v2(Handle* out) {
  *out = new_handle();
  return 0;
}
VRAM_NULL_API int cublasGetMathMode(Handle, int* out) {
  *out = 0;
  return 0;
}
VRAM_NULL_API int cublasGetPointerMode_v2(Handle, int* out) {
  *out = 0;
  return 0;
}
VRAM_NULL_API int cublasGetVersion_v2(Handle, int* out) {
  *out = 130100;
  return 0;
}
VRAM_NULL_API std::size_t cublasLtGetVersion() { return 130100; }
VRAM_NULL_API int cublasLtCreate(Handle* out) {
  *out = new_handle();
  return 0;
}
VRAM_NULL_API int cublasLtMatmulDescCreate(Handle* out, int, int) {
  *out = new_handle();
  return 0;
}
VRAM_NULL_API int cublasLtMatmulPreferenceCreate(Handle* out) {
  *out = new_handle();
  return 0;
}
VRAM_NULL_API int cublasLtMatrixLayoutCreate(Handle* out, int, std::uint64_t, std::uint64_t, std::int64_t) {
  *out = new_handle();
  return 0;
}
// cublasLtMatmulHeuristicResult_t: an algorithm of 64 bytes, its workspace, a status, waves and reserved.
VRAM_NULL_API int cublasLtMatmulAlgoGetHeuristic(Handle, Handle, Handle, Handle, Handle, Handle, Handle,
                                                 int wanted, void* results, int* found) {
  constexpr std::size_t kResultBytes = 96;
  std::memset(results, 0, kResultBytes * static_cast<std::size_t>(wanted > 0 ? wanted : 0));
  *found = wanted > 0 ? 1 : 0;
  return 0;
}

// ---- batches of factorizations, which report to the host ------------------------------------------------

#define VRAM_BLAS_BATCHES(T)                                                                                 \
  VRAM_NULL_API int cublas##T##geqrfBatched(Handle, int, int, void* const*, int, void* const*, int* info,    \
                                            int) {                                                           \
    *info = 0;                                                                                               \
    return 0;                                                                                                \
  }                                                                                                          \
  VRAM_NULL_API int cublas##T##gelsBatched(Handle, int, int, int, int, void* const*, int, void* const*, int, \
                                           int* info, int*, int) {                                           \
    *info = 0;                                                                                               \
    return 0;                                                                                                \
  }                                                                                                          \
  VRAM_NULL_API int cublas##T##getrsBatched(Handle, int, int, int, const void* const*, int, const int*,      \
                                            void* const*, int, int* info, int) {                             \
    *info = 0;                                                                                               \
    return 0;                                                                                                \
  }

VRAM_BLAS_BATCHES(S)
VRAM_BLAS_BATCHES(D)
VRAM_BLAS_BATCHES(C)
VRAM_BLAS_BATCHES(Z)
