// Functions that the null GPU does not have. Each is answered by a small piece of code that knows its name:
// it says once on stderr what was called and fails with "not supported".
#pragma once

#include <string>

#include "null_gpu/abi.hpp"

namespace vram::null_gpu {

// Reports `name`, once, and fails.
Result not_supported(const char* name);
// A function that reports `name` and fails. The same one for the same name.
void* stub_for(const char* name);
// A function of the driver, by the name that cuGetProcAddress takes, in the form that it has in a version of
// CUDA (12030 is 12.3; 0: the driver's version); a stub for one that is not known.
void* driver_function(const char* name, int version);
// The names of the functions that were called and are not known, one a line.
std::string unknown_calls();
// Has the loaded libraries call stubs instead of functions of CUDA's libraries that the null GPU does not
// have. To be called again when more libraries were loaded.
void adopt_libraries();

}  // namespace vram::null_gpu
