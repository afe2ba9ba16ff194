// Errors that the null GPU returns: their names and texts, and the one that the runtime remembers.
#pragma once

#include "null_gpu/abi.hpp"

namespace vram::null_gpu {

const char* error_text(Result error);
const char* runtime_error_name(Result error);
const char* driver_error_name(Result error);

// The last error of a function of the runtime that the calling thread has not asked for.
Result& last_error();
// What a function of the runtime returns: an error is remembered.
inline Result returned(Result result) {
  if (result != kSuccess) last_error() = result;
  return result;
}

}  // namespace vram::null_gpu
