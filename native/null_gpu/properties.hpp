// The properties and attributes of the null device, from its profile.
#pragma once

#include "null_gpu/abi.hpp"

namespace vram::null_gpu {

int attribute(int number);
void fill_properties13(void* out, int device);  // cudaDeviceProp of CUDA 13
Uuid uuid_of(int device);
// Blocks of so many threads that a multiprocessor runs at a time.
int blocks_of(int threads);

}  // namespace vram::null_gpu
