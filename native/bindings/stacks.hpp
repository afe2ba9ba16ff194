// The origin of an allocation: the current tag and the Python stack, interned together as one number, a
// label. The core carries it wherever it carries a tag, so that live blocks and events have their stack at no
// extra cost. The pool that created a tag knows its name.
#pragma once

#include <Python.h>

#include <cstdint>
#include <vector>

namespace vram {

// The label of an allocation made now with `tag`. A known stack costs a walk and a lookup and creates no
// object. Without a Python frame, or beyond the maximum number of stacks, it is the tag itself. Needs the
// GIL; never fails.
std::uint32_t label_here(std::uint32_t tag);

// Number of different labels in all pools of the process, and how often one was not kept because the table
// was full. Need the GIL.
std::uint64_t stacks_kept();
std::uint64_t stacks_lost();

// The tag of a label. Needs the GIL.
std::uint32_t tag_of(std::uint32_t label);

// Every label of a tag so far, in order. Needs the GIL.
std::vector<std::uint32_t> labels_of(std::uint32_t tag);

// The stack of a label, innermost first, as a tuple of vram.trace.Frame; empty if it has none. Frames of this
// package are omitted. A new reference, or null with an error set.
PyObject* stack_of(std::uint32_t label);

}  // namespace vram
