// What a process leaves for `vram.predict`, however it ends: the file PID.use in the folder that the
// environment variable VRAM_PREDICT_FOLDER names, with a `Use` of every device. It exists from the first
// request for memory on. The file is mapped, so nothing is lost when the process is killed.
#pragma once

#include <cstdint>

namespace vram::null_gpu {

struct Use {
  std::uint64_t peak;     // bytes in use at most, with what the context takes
  std::uint64_t refused;  // bytes of the last request that was refused; 0: none was
};

void leave_use(int device, const Use& use);

}  // namespace vram::null_gpu
