// cuSOLVER of the null GPU: workspaces by rule, factorizations do nothing and report success.
#include "null_gpu/abi.hpp"
#include "null_gpu/order.hpp"
#include "null_gpu/rules.hpp"

using namespace vram::null_gpu;

namespace {

int make(Handle* out) {
  *out = new_handle();
  return 0;
}
int answer(int* out, std::uint64_t elements) {
  *out = static_cast<int>(elements);
  return 0;
}
std::uint64_t size(int value) { return static_cast<std::uint64_t>(value > 0 ? value : 0); }
std::uint64_t size(std::int64_t value) { return static_cast<std::uint64_t>(value > 0 ? value : 0); }

// Bytes of an element of cudaDataType_t.
std::uint64_t element_bytes(int type) { return type == 5 ? 16 : type == 1 || type == 4 ? 8 : 4; }
int answer_bytes(std::size_t* device, std::size_t* host, std::uint64_t elements, int type) {
  *device = elements * element_bytes(type);
  *host = 0;
  return 0;
}

}  // namespace

VRAM_NULL_API int cusolverDnCreate(Handle* out) { return make(out); }
VRAM_NULL_API int cusolverDnCreateParams(Handle* out) { return make(out); }
VRAM_NULL_API int cusolverDnCreateGesvdjInfo(Handle* out) { return make(out); }
VRAM_NULL_API int cusolverDnCreateSyevjInfo(Handle* out) { return make(out); }

// ---- for each type of element: S, D, C and Z --------------------------------------------------------------

#define VRAM_SOLVER_SIZES(T, ORGQR, ORMQR, SYEV)                                                             \
  VRAM_NULL_API int cusolverDn##T##getrf_bufferSize(Handle, int m, int n, void*, int, int* out) {            \
    return answer(out, solver::lu(size(m), size(n)));                                                        \
  }                                                                                                          \
  VRAM_NULL_API int cusolverDn##T##potrf_bufferSize(Handle, int, int n, void*, int, int* out) {              \
    return answer(out, solver::cholesky(size(n)));                                                           \
  }                                                                                                          \
  VRAM_NULL_API int cusolverDn##T##sytrf_bufferSize(Handle, int n, void*, int, int* out) {                   \
    return answer(out, solver::lu(size(n), size(n)));                                                        \
  }                                                                                                          \
  VRAM_NULL_API int cusolverDn##T##geqrf_bufferSize(Handle, int, int n, void*, int, int* out) {              \
    return answer(out, solver::qr(size(n)));                                                                 \
  }                                                                                                          \
  VRAM_NULL_API int cusolverDn##T##ORGQR##_bufferSize(Handle, int m, int n, int, const void*, int,           \
                                                      const void*, int* out) {                               \
    return answer(out, solver::q_of_qr(size(m), size(n)));                                                   \
  }                                                                                                          \
  VRAM_NULL_API int cusolverDn##T##ORMQR##_bufferSize(Handle, int, int, int m, int n, int, const void*, int, \
                                                      const void*, const void*, int, int* out) {             \
    return answer(out, solver::q_of_qr(size(m), size(n)));                                                   \
  }                                                                                                          \
  VRAM_NULL_API int cusolverDn##T##gesvd_bufferSize(Handle, int m, int n, int* out) {                        \
    return answer(out, solver::svd(size(m), size(n)));                                                       \
  }                                                                                                          \
  VRAM_NULL_API int cusolverDn##T##gesvdj_bufferSize(Handle, int, int, int m, int n, const void*, int,       \
                                                     const void*, const void*, int, const void*, int,        \
                                                     int* out, Handle) {                                     \
    return answer(out, solver::svd_jacobi(size(m), size(n)));                                                \
  }                                                                                                          \
  VRAM_NULL_API int cusolverDn##T##gesvdjBatched_bufferSize(Handle, int, int m, int n, const void*, int,     \
                                                            const void*, const void*, int, const void*, int, \
                                                            int* out, Handle, int) {                         \
    return answer(out, 32 * size(m > n ? m : n));                                                            \
  }                                                                                                          \
  VRAM_NULL_API int cusolverDn##T##gesvdaStridedBatched_bufferSize(                                          \
      Handle, int, int, int m, int n, const void*, int, long long, const void*, long long, const void*, int, \
      long long, const void*, int, long long, int* out, int batch) {                                         \
    return answer(out, solver::svd_approximate(size(m), size(n), size(batch)));                              \
  }                                                                                                          \
  VRAM_NULL_API int cusolverDn##T##SYEV##d_bufferSize(Handle, int, int, int n, const void*, int,             \
                                                      const void*, int* out) {                               \
    return answer(out, solver::eigen(size(n)));                                                              \
  }                                                                                                          \
  VRAM_NULL_API int cusolverDn##T##SYEV##j_bufferSize(Handle, int, int, int n, const void*, int,             \
                                                      const void*, int* out, Handle) {                       \
    return answer(out, solver::eigen_jacobi(size(n), 1));                                                    \
  }                                                                                                          \
  VRAM_NULL_API int cusolverDn##T##SYEV##jBatched_bufferSize(Handle, int, int, int n, const void*, int,      \
                                                             const void*, int* out, Handle, int batch) {     \
    return answer(out, solver::eigen_jacobi(size(n), size(batch)));                                          \
  }

VRAM_SOLVER_SIZES(S, orgqr, ormqr, syev)
VRAM_SOLVER_SIZES(D, orgqr, ormqr, syev)
VRAM_SOLVER_SIZES(C, ungqr, unmqr, heev)
VRAM_SOLVER_SIZES(Z, ungqr, unmqr, heev)

// ---- for any type of element ------------------------------------------------------------------------------

VRAM_NULL_API int cusolverDnXpotrf_bufferSize(Handle, Handle, int, std::int64_t n, int, const void*,
                                              std::int64_t, int type, std::size_t* device,
                                              std::size_t* host) {
  return answer_bytes(device, host, solver::cholesky(size(n)), type);
}
VRAM_NULL_API int cusolverDnXgeqrf_bufferSize(Handle, Handle, std::int64_t, std::int64_t n, int, const void*,
                                              std::int64_t, int, const void*, int type, std::size_t* device,
                                              std::size_t* host) {
  return answer_bytes(device, host, solver::qr(size(n)), type);
}
VRAM_NULL_API int cusolverDnXsyevd_bufferSize(Handle, Handle, int, int, std::int64_t n, int, const void*,
                                              std::int64_t, int, const void*, int type, std::size_t* device,
                                              std::size_t* host) {
  return answer_bytes(device, host, solver::eigen(size(n)), type);
}
VRAM_NULL_API int cusolverDnXsyevBatched_bufferSize(Handle, Handle, int, int, std::int64_t n, int,
                                                    const void*, std::int64_t, int, const void*, int type,
                                                    std::size_t* device, std::size_t* host,
                                                    std::int64_t batch) {
  return answer_bytes(device, host, solver::eigen_jacobi(size(n), size(batch)), type);
}
VRAM_NULL_API int cusolverDnXgeev_bufferSize(Handle, Handle, int, int, std::int64_t n, int, const void*,
                                             std::int64_t, int, const void*, int, const void*, std::int64_t,
                                             int, const void*, std::int64_t, int type, std::size_t* device,
                                             std::size_t* host) {
  return answer_bytes(device, host, solver::eigen(size(n)), type);
}
VRAM_NULL_API int cusolverDnXsytrs_bufferSize(Handle, int, std::int64_t n, std::int64_t, int type,
                                              const void*, std::int64_t, const std::int64_t*, int, void*,
                                              std::int64_t, std::size_t* device, std::size_t* host) {
  return answer_bytes(device, host, solver::lu(size(n), size(n)), type);
}
