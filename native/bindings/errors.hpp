// Converts a Status to the exceptions of vram.errors. The only place that knows both.
#pragma once

#include "base/types.hpp"

namespace vram {

// "out_of_memory" and so on, as in the `code` attribute of errors.
const char* code_name(Code code);
// False if there is no code with that name.
bool code_from_name(const char* name, Code* out);

// Raises the exception for `status`: OutOfMemory, InvalidFree (an invalid "free") or else DeviceError, with
// call, code and native as attributes. `what` completes the message: "vram failed to <what>".
// pre: the GIL is held and the status is neither ok nor not_ready.
[[noreturn]] void raise_status(const Status& status, const char* what);

inline void require_ok(const Status& status, const char* what) {
  if (!status.ok()) raise_status(status, what);
}

}  // namespace vram
