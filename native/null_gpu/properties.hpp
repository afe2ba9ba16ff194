// The properties and attributes of the null device, from its profile.
#pragma once

#include "null_gpu/abi.hpp"

namespace vram::null_gpu {

int attribute(int number);
// The CUDA runtime that the program was built with, 12 or 13: layouts differ.
int runtime_version();
void fill_properties(void* out, int device, int version);  // cudaDeviceProp
Uuid uuid_of(int device);
// Blocks of so many threads that a multiprocessor runs at a time.
int blocks_of(int threads);

}  // namespace vram::null_gpu
