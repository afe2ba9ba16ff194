// What the host reads back from a device that computes nothing: zeros, except where the kernel that ran last
// says by its name what its result must be, or where the caller has announced a value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "null_gpu/abi.hpp"

namespace vram::null_gpu {

// A kernel of the program, by the host function that stands for it.
void kernel_registered(const void* function, const char* name);
// It is launched; `arguments` points to its arguments, or is null where they are not known.
void kernel_launched(const void* function, void** arguments);

// A kernel of which nothing is known is launched.
inline void kernel_launched() { kernel_launched(nullptr, nullptr); }

// Copies that involve the device move nothing but what is known (Contents); the host reads that, or the value
// expected next, or zeros.
void copied(void* to, const void* from, std::size_t bytes);
void filled(void* to, int value, std::size_t bytes);

}  // namespace vram::null_gpu
