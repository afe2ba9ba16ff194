// Who allocates: the tag in force and the Python stack, interned together as one number, a label. The core
// carries it wherever it carries a tag, so that a live block and an event know their stack at no further
// cost. What tags are called is known to the pool that made them.
#pragma once

#include <Python.h>

#include <cstdint>
#include <vector>

namespace vram {

// The label of what is allocated here and now under `tag`. A stack seen before costs a walk and a look-up,
// and makes no object. Without a Python frame, or with more different stacks than are kept, the tag itself.
// Needs the GIL; never fails.
std::uint32_t label_here(std::uint32_t tag);

// Different labels that are kept, in all pools of the process, and how often one was not for want of room.
// Need the GIL.
std::uint64_t stacks_kept();
std::uint64_t stacks_lost();

// The tag of a label. Needs the GIL.
std::uint32_t tag_of(std::uint32_t label);

// Every label of a tag so far, in order. Needs the GIL.
std::vector<std::uint32_t> labels_of(std::uint32_t tag);

// The stack of a label, innermost first, as a tuple of vram.trace.Frame; empty without one. Calls inside this
// package are left out. A new reference, or null with an error set.
PyObject* stack_of(std::uint32_t label);

}  // namespace vram
