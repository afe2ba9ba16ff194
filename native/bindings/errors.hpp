// From Status to the exceptions of vram.errors. The only place that knows both.
#pragma once

#include "base/types.hpp"

namespace vram {

// "out_of_memory" and so on, as the `code` attribute of errors has it.
const char* code_name(Code code);
// False when there is no code of that name.
bool code_from_name(const char* name, Code* out);

// Raises what `status` stands for: OutOfMemory, InvalidFree (an invalid "free") or else DeviceError,
// with call, code and native as attributes. `what` begins the message: "vram could not <what>".
// pre: the GIL is held and the status is neither ok nor not_ready.
[[noreturn]] void raise_status(const Status& status, const char* what);

inline void require_ok(const Status& status, const char* what) {
  if (!status.ok()) raise_status(status, what);
}

}  // namespace vram
