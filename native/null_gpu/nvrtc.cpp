// NVRTC (libnvrtc) of the null GPU. Nothing runs, so nothing is compiled: a program's code is its name. cuDNN
// compiles a kernel for every new shape of attention, which would take seconds each.
#include <cstring>
#include <string>

#include "null_gpu/abi.hpp"
#include "null_gpu/profile.hpp"

using namespace vram::null_gpu;

namespace {

constexpr int kInvalidInput = 3;
constexpr char kCode[] = "null GPU";  // instead of PTX or a cubin
constexpr int kArchitectures[] = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};

struct Program {
  std::string name;
};

int size_of_code(std::size_t* out) {
  *out = sizeof(kCode);
  return 0;
}
int copy_code(char* out) {
  std::memcpy(out, kCode, sizeof(kCode));
  return 0;
}

}  // namespace

VRAM_NULL_API int nvrtcVersion(int* major, int* minor) {
  *major = Profile::get().driver / 1000;
  *minor = Profile::get().driver % 1000 / 10;
  return 0;
}
VRAM_NULL_API const char* nvrtcGetErrorString(int error) {
  return error == 0 ? "NVRTC_SUCCESS" : "NVRTC_ERROR_INVALID_INPUT";
}
VRAM_NULL_API int nvrtcGetNumSupportedArchs(int* out) {
  *out = static_cast<int>(std::size(kArchitectures));
  return 0;
}
VRAM_NULL_API int nvrtcGetSupportedArchs(int* out) {
  std::memcpy(out, kArchitectures, sizeof(kArchitectures));
  return 0;
}
VRAM_NULL_API int nvrtcCreateProgram(Program** out, const char* source, const char* name, int,
                                     const char* const*, const char* const*) {
  if (source == nullptr) return kInvalidInput;
  *out = new Program{name != nullptr ? name : "default_program"};
  return 0;
}
VRAM_NULL_API int nvrtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return 0;
}
VRAM_NULL_API int nvrtcCompileProgram(Program*, int, const char* const*) { return 0; }
VRAM_NULL_API int __nvrtcCPEx(...) { return 0; }  // compiles, too; not documented
VRAM_NULL_API int nvrtcGetPTXSize(Program*, std::size_t* out) { return size_of_code(out); }
VRAM_NULL_API int nvrtcGetPTX(Program*, char* out) { return copy_code(out); }
VRAM_NULL_API int nvrtcGetCUBINSize(Program*, std::size_t* out) { return size_of_code(out); }
VRAM_NULL_API int nvrtcGetCUBIN(Program*, char* out) { return copy_code(out); }
VRAM_NULL_API int nvrtcGetLTOIRSize(Program*, std::size_t* out) { return size_of_code(out); }
VRAM_NULL_API int nvrtcGetLTOIR(Program*, char* out) { return copy_code(out); }
VRAM_NULL_API int nvrtcGetProgramLogSize(Program*, std::size_t* out) {
  *out = 1;
  return 0;
}
VRAM_NULL_API int nvrtcGetProgramLog(Program*, char* out) {
  *out = 0;
  return 0;
}
VRAM_NULL_API int nvrtcAddNameExpression(Program*, const char*) { return 0; }
VRAM_NULL_API int nvrtcGetLoweredName(Program*, const char* name, const char** out) {
  *out = name;  // valid as long as the caller's own; names of the null GPU's kernels are not looked at
  return 0;
}
