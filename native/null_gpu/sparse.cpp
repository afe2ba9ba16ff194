// cuSPARSE of the null GPU: descriptors keep the sizes of matrices, buffers are empty, products do nothing.
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "null_gpu/abi.hpp"
#include "null_gpu/order.hpp"

using namespace vram::null_gpu;

namespace {

struct Matrix {
  std::int64_t rows, columns, entries;
};
std::mutex mutex;
std::unordered_map<Handle, Matrix>& matrices() {
  static auto* const made = new std::unordered_map<Handle, Matrix>;
  return *made;
}
int make(Handle* out) {
  *out = new_handle();
  return 0;
}
int make(Handle* out, const Matrix& matrix) {
  const std::lock_guard lock(mutex);
  matrices()[*out = new_handle()] = matrix;
  return 0;
}

}  // namespace

VRAM_NULL_API int cusparseCreate(Handle* out) { return make(out); }
VRAM_NULL_API const char* cusparseGetErrorString(int error) {
  return error == 0 ? "success" : "not supported";
}
VRAM_NULL_API int cusparseCreateMatDescr(Handle* out) { return make(out); }
VRAM_NULL_API int cusparseCreateBsrsm2Info(Handle* out) { return make(out); }
VRAM_NULL_API int cusparseCreateBsrsv2Info(Handle* out) { return make(out); }
VRAM_NULL_API int cusparseSpGEMM_createDescr(Handle* out) { return make(out); }
VRAM_NULL_API int cusparseSpSM_createDescr(Handle* out) { return make(out); }
VRAM_NULL_API int cusparseSpSV_createDescr(Handle* out) { return make(out); }
VRAM_NULL_API int cusparseCreateDnVec(Handle* out, std::int64_t, void*, int) { return make(out); }
VRAM_NULL_API int cusparseCreateDnMat(Handle* out, std::int64_t, std::int64_t, std::int64_t, void*, int,
                                      int) {
  return make(out);
}
VRAM_NULL_API int cusparseCreateCsr(Handle* out, std::int64_t rows, std::int64_t columns,
                                    std::int64_t entries, void*, void*, void*, int, int, int, int) {
  return make(out, {rows, columns, entries});
}
VRAM_NULL_API int cusparseCreateCoo(Handle* out, std::int64_t rows, std::int64_t columns,
                                    std::int64_t entries, void*, void*, void*, int, int, int) {
  return make(out, {rows, columns, entries});
}
VRAM_NULL_API int cusparseDestroySpMat(Handle matrix) {
  const std::lock_guard lock(mutex);
  matrices().erase(matrix);
  return 0;
}
VRAM_NULL_API int cusparseSpMatGetSize(Handle matrix, std::int64_t* rows, std::int64_t* columns,
                                       std::int64_t* entries) {
  const std::lock_guard lock(mutex);
  const Matrix& found = matrices()[matrix];
  *rows = found.rows;
  *columns = found.columns;
  *entries = found.entries;
  return 0;
}

// ---- buffers --------------------------------------------------------------------------------------------

VRAM_NULL_API int cusparseSpMM_bufferSize(Handle, int, int, const void*, Handle, Handle, const void*, Handle,
                                          int, int, std::size_t* bytes) {
  *bytes = 0;
  return 0;
}
VRAM_NULL_API int cusparseSpMV_bufferSize(Handle, int, const void*, Handle, Handle, const void*, Handle, int,
                                          int, std::size_t* bytes) {
  *bytes = 0;
  return 0;
}
VRAM_NULL_API int cusparseSDDMM_bufferSize(Handle, int, int, const void*, Handle, Handle, const void*, Handle,
                                           int, int, std::size_t* bytes) {
  *bytes = 0;
  return 0;
}
VRAM_NULL_API int cusparseXcoosort_bufferSizeExt(Handle, int, int, int entries, const int*, const int*,
                                                 std::size_t* bytes) {
  *bytes = 16 * static_cast<std::size_t>(entries);
  return 0;
}
VRAM_NULL_API int cusparseXcsrsort_bufferSizeExt(Handle, int, int, int entries, const int*, const int*,
                                                 std::size_t* bytes) {
  *bytes = 16 * static_cast<std::size_t>(entries);
  return 0;
}
