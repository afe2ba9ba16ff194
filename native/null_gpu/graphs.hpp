// `Graphs`: the objects that graphs of the null GPU keep alive. A graph records nothing else.
#pragma once

#include <map>
#include <mutex>
#include <unordered_map>

#include "null_gpu/abi.hpp"

namespace vram::null_gpu {

class Graphs {
 public:
  static Graphs& get();

  Handle instantiate(Handle graph);  // the new graph keeps what `graph` keeps
  Result destroy(Handle graph);
  Handle object_create(void* object, void (*end)(void*), unsigned count);
  Result object_release(Handle object, unsigned count);
  // kMove in `flags`: the caller's references go to the graph; else the graph gets new ones.
  Result retain(Handle graph, Handle object, unsigned count, unsigned flags);

 private:
  static constexpr unsigned kMove = 1;
  struct Object {
    void* object;
    void (*destroy)(void*);
    unsigned references;
  };
  std::mutex mutex_;
  std::unordered_map<Handle, Object> objects_;
  std::unordered_map<Handle, std::map<Handle, unsigned>> kept_;  // by graph
};

}  // namespace vram::null_gpu
