// cuFFT of the null GPU: plans answer a workspace by rule, transforms do nothing.
#include <atomic>

#include "null_gpu/abi.hpp"
#include "null_gpu/rules.hpp"

using namespace vram::null_gpu;

namespace {

// cudaDataType_t: the bytes of a complex number of the precision that a type belongs to.
std::uint64_t complex_bytes(int type) {
  switch (type) {
    case 1:
    case 5:
      return 16;
    case 2:
    case 6:
      return 4;
    default:
      return 8;
  }
}
bool is_real(int type) { return type <= 2; }

}  // namespace

VRAM_NULL_API int cufftCreate(int* plan) {
  static std::atomic<int> last{0};
  *plan = ++last;
  return 0;
}
VRAM_NULL_API int cufftDestroy(int) { return 0; }
VRAM_NULL_API int cufftSetAutoAllocation(int, int) { return 0; }
VRAM_NULL_API int cufftSetStream(int, Handle) { return 0; }
VRAM_NULL_API int cufftSetWorkArea(int, void*) { return 0; }
VRAM_NULL_API int cufftXtExec(int, void*, void*, int) { return 0; }
VRAM_NULL_API int cufftXtMakePlanMany(int, int rank, const long long* extents, const long long*, long long,
                                      long long, int input, const long long*, long long, long long,
                                      int output, long long batch, std::size_t* bytes, int execution) {
  std::int64_t sizes[3] = {1, 1, 1};
  for (int i = 0; i < rank && i < 3; ++i) sizes[i] = extents[i];
  *bytes = fft_workspace(rank, sizes, static_cast<std::uint64_t>(batch), complex_bytes(execution),
                         is_real(input) || is_real(output));
  return 0;
}
