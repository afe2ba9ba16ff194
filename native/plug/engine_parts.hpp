// Functions of the engine's table (engine.h) by subject: sharing.cpp and pinned.cpp define them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plug/engine.h"

extern "C" {
std::size_t vram_engine_share(void* address, char* name, std::size_t room, std::int64_t* offset,
                              const char** why);
void* vram_engine_attach(int device, const char* name, std::size_t length, const char** why);
void vram_engine_detach(void* address);

void* vram_engine_pinned_allocate(int device, std::size_t bytes, const char** why);
int vram_engine_pinned_free(void* address);
int vram_engine_pinned_record(void* address, int device, void* stream);
void vram_engine_pinned_trim(void);
void vram_engine_pinned_stats(VramPinnedStats* out);
void vram_engine_pinned_reset_peaks(void);
}
