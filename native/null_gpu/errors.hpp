// Names and texts of the errors that the null GPU returns.
#pragma once

#include "null_gpu/abi.hpp"

namespace vram::null_gpu {

const char* error_text(Result error);
const char* runtime_error_name(Result error);
const char* driver_error_name(Result error);

}  // namespace vram::null_gpu
