// Gives the pages of shared allocations to other processes of the same user that know its secret. Defines
// ShareServer: a thread that starts with the first allocation that is shared and answers requests one by one
// (wire.hpp). It keeps nothing between them: pages are exported when asked for, and their descriptors are
// closed with the answer.
//
// Fork: the child closes the parent's sockets, and has a server of its own from its first share on. Exit:
// nobody waits for the thread.
#pragma once

#include "sharing/wire.hpp"

namespace vram {

class ShareServer {
 public:
  // Exports what a request asks for; called on the server's thread.
  using Export = Status (*)(const PageRequest& request, std::vector<SharedPage>* pages);
  // Starts the server of this process, if it has none.
  static Status start(Export exporter);
  // Identifies this process; another one in the child of a fork, with other secrets.
  static const Digits& identity();
  static const Secrets& secrets();
  static constexpr int kConnections = 32;  // the one that was silent longest makes room for more
};

}  // namespace vram
