// `Profile`: the GPU that is stood in for. Read once from the environment variable VRAM_NULL_GPU, which
// `vram.predict.profiles` writes: "name=NVIDIA H200;memory=150109290496;devices=1;…".
#pragma once

#include <cstdint>
#include <string>

namespace vram::null_gpu {

inline constexpr int kMostDevices = 64;

struct Profile {
  std::string name = "NVIDIA H200";
  std::uint64_t memory = 0;    // bytes the device has
  std::uint64_t overhead = 0;  // bytes that the context and its modules take
  int devices = 1;
  int major = 9;  // compute capability
  int minor = 0;
  int multiprocessors = 132;
  int l2_bytes = 62914560;
  int shared_bytes = 233472;  // of a multiprocessor; a block may opt in to all but 1 KiB of it
  int threads = 2048;         // of a multiprocessor
  int blocks = 32;            // of a multiprocessor
  int clock_khz = 1980000;
  int memory_clock_khz = 3201000;
  int bus_bits = 6016;
  int driver = 13000;  // the CUDA version of the driver

  static const Profile& get();
};

}  // namespace vram::null_gpu
