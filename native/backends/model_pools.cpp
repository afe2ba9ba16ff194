// The model's driver pools. model.hpp describes what they simulate; model.cpp has the streams whose order
// they follow.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "backends/model.hpp"

namespace vram {

namespace {

constexpr Status kOk{};
constexpr std::uint64_t kGranule = 32 * kMiB;
constexpr double kAllocateUs = 0.65;
constexpr double kFreeUs = 0.65;
constexpr double kGranuleUs = 3850.0;

using Attribute = DriverPoolAttribute;

constexpr bool is_flag(Attribute attribute) {
  return attribute <= Attribute::reuse_allow_internal_dependencies;
}

// The contents of the descriptor of an exported pool, and of an exported pointer.
struct Exported {
  const void* model = nullptr;
  DriverPoolHandle pool = 0;
  Address address = 0;
};
static_assert(sizeof(Exported) <= sizeof(SharedPointer));

template <class Pool>
void note_high(Pool& pool) {
  pool[Attribute::reserved_mem_high] =
      std::max(pool[Attribute::reserved_mem_high], pool[Attribute::reserved_mem_current]);
  pool[Attribute::used_mem_high] =
      std::max(pool[Attribute::used_mem_high], pool[Attribute::used_mem_current]);
}

}  // namespace

// ---- creating -------------------------------------------------------------------------------------------

Status ModelBackend::pool_create(const DriverPoolProperties& properties, DriverPoolHandle* out) {
  Lock lock;
  Status status;
  if (!begin(kPoolCreate, &lock, &status)) return status;
  *out = pools_.add(ModelPool(properties));
  return kOk;
}

Status ModelBackend::pool_default(DriverPoolHandle* out) {
  Lock lock;
  Status status;
  if (!begin(kPoolDefault, &lock, &status)) return status;
  if (default_pool_ == 0) default_pool_ = pools_.add(ModelPool(DriverPoolProperties{}));
  *out = default_pool_;
  return kOk;
}

// Beyond the contract, it refuses if memory is live or queued work still uses it.
Status ModelBackend::pool_destroy(DriverPoolHandle handle) {
  Lock lock;
  Status status;
  if (!begin(kPoolDestroy, &lock, &status)) return status;
  ModelPool* pool = pools_.find(handle);
  if (pool == nullptr || handle == default_pool_ || (*pool)[Attribute::used_mem_current] != 0)
    return {Code::invalid, 0, "pool_destroy"};
  for (const auto& [address, bytes] : pool->granules)
    if (busy(address, bytes)) return {Code::invalid, 0, "pool_destroy"};
  for (const auto& [address, bytes] : pool->granules) {
    ledger_.release(address);
    plain_addresses_.give(address, bytes);
  }
  pools_.remove(handle);
  return kOk;
}

// ---- allocation -----------------------------------------------------------------------------------------

bool ModelBackend::reached(const Piece& piece) const {
  if (piece.for_all) return true;
  if (schedule_ == Schedule::lag) return piece.moment <= now_us();
  return streams_[piece.freed_on]->done >= piece.position;
}

bool ModelBackend::mergeable(const Piece& left, const Piece& right) const {
  if (left.used || right.used) return false;
  return left.freed_on == right.freed_on || (reached(left) && reached(right));
}

// Merges free neighbors; the later of their frees counts for both.
void ModelBackend::merge_pieces(ModelPool& pool) {
  for (auto left = pool.pieces.begin(); left != pool.pieces.end();) {
    const auto right = std::next(left);
    const bool touching = right != pool.pieces.end() && left->first + left->second.bytes == right->first &&
                          !pool.granules.contains(right->first);
    if (!touching || !mergeable(left->second, right->second)) {
      left = right;
      continue;
    }
    Piece& piece = left->second;
    pool.free.erase({piece.bytes, left->first});
    pool.free.erase({right->second.bytes, right->first});
    piece.bytes += right->second.bytes;
    pool.free.insert({piece.bytes, left->first});
    piece.for_all = piece.for_all && right->second.for_all;
    if (piece.freed_on == right->second.freed_on) {
      piece.position = std::max(piece.position, right->second.position);
      piece.moment = std::max(piece.moment, right->second.moment);
    }
    pool.pieces.erase(right);
  }
}

// The smallest free piece that the stream may use now.
ModelBackend::PieceAt ModelBackend::fitting_piece(ModelPool& pool, std::uint64_t bytes, StreamHandle stream) {
  const bool opportunistic = pool[Attribute::reuse_allow_opportunistic] != 0;
  for (auto at = pool.free.lower_bound({bytes, 0}); at != pool.free.end(); ++at) {
    const auto found = pool.pieces.find(at->second);
    const Piece& piece = found->second;
    if (piece.for_all || piece.freed_on == stream || (opportunistic && reached(piece))) return found;
  }
  return pool.pieces.end();
}

// A whole number of granules, or less if only less is left.
ModelBackend::PieceAt ModelBackend::grow_pool(ModelPool& pool, std::uint64_t bytes) {
  std::uint64_t room = ledger_.capacity() - ledger_.used_bytes();
  const std::uint64_t reserved = pool[Attribute::reserved_mem_current];
  if (const std::uint64_t most = pool.properties.max_size; most != 0)
    room = std::min(room, most > reserved ? most - reserved : 0);
  const std::uint64_t wanted = std::min(round_up(bytes, kGranule), room / kSlotBytes * kSlotBytes);
  if (wanted < bytes) return pool.pieces.end();
  const Address address = plain_addresses_.take(wanted);
  if (address == 0) return pool.pieces.end();
  ledger_.reserve(address, wanted);
  charge(kPoolAllocate, kGranuleUs * static_cast<double>(wanted) / static_cast<double>(kGranule));
  pool.granules.emplace(address, wanted);
  pool[Attribute::reserved_mem_current] += wanted;
  Piece piece;
  piece.bytes = wanted;
  piece.for_all = true;
  pool.free.insert({wanted, address});
  return pool.pieces.emplace(address, piece).first;
}

Status ModelBackend::pool_allocate(DriverPoolHandle handle, std::uint64_t bytes, StreamHandle stream,
                                   Address* out) {
  Lock lock;
  Status status;
  if (!begin_on(&stream, kPoolAllocate, &lock, &status)) return status;
  charge(kPoolAllocate, kAllocateUs);
  ModelPool* pool = pools_.find(handle);
  if (pool == nullptr || pool->exporter != 0 || stream_of(stream) == nullptr || bytes == 0)
    return {Code::invalid, 0, "pool_allocate"};
  if (bytes > ledger_.capacity()) return {Code::out_of_memory, 0, "pool_allocate"};
  if (Graph* graph = capture_on(stream)) return allocate_in_graph(*graph, bytes, out);
  bytes = round_up(bytes, kUnit);
  PieceAt piece = fitting_piece(*pool, bytes, stream);
  if (piece == pool->pieces.end()) {
    merge_pieces(*pool);
    piece = fitting_piece(*pool, bytes, stream);
  }
  if (piece == pool->pieces.end()) piece = grow_pool(*pool, bytes);
  if (piece == pool->pieces.end()) return {Code::out_of_memory, 0, "pool_allocate"};
  Piece rest = piece->second;
  pool->free.erase({rest.bytes, piece->first});
  rest.bytes -= bytes;
  if (rest.bytes != 0) {
    pool->pieces.emplace(piece->first + bytes, rest);
    pool->free.insert({rest.bytes, piece->first + bytes});
  }
  piece->second = Piece{};
  piece->second.bytes = bytes;
  piece->second.used = true;
  (*pool)[Attribute::used_mem_current] += bytes;
  note_high(*pool);
  *out = piece->first;
  return kOk;
}

Status ModelBackend::allocate_in_graph(Graph& graph, std::uint64_t bytes, Address* out) {
  bytes = round_up(bytes, kSlotBytes);
  if (const Code code = ledger_.may_reserve(bytes); code != Code::ok) return {code, 0, "pool_allocate"};
  const Address address = plain_addresses_.take(bytes);
  if (address == 0) return {Code::out_of_memory, 0, "pool_allocate"};
  ledger_.reserve(address, bytes);
  graph_memory_.emplace(address, bytes);
  graph.gone.push_back([this, address, bytes] {
    const std::lock_guard lock(mutex_);
    graph_memory_.erase(address);
    ledger_.release(address);
    plain_addresses_.give(address, bytes);
  });
  *out = address;
  return kOk;
}

ModelBackend::ModelPool* ModelBackend::owner_of(Address address, PieceAt* piece) {
  ModelPool* owner = nullptr;
  pools_.each([&](DriverPoolHandle handle, const ModelPool&) {
    ModelPool* pool = pools_.find(handle);
    const auto at = pool->pieces.find(address);
    if (at == pool->pieces.end() || !at->second.used) return;
    owner = pool;
    *piece = at;
  });
  return owner;
}

// Importers free before the exporter, so while there are imports, the free is one of theirs.
Status ModelBackend::pool_free(Address address, StreamHandle handle) {
  Lock lock;
  Status status;
  if (!begin_on(&handle, kPoolFree, &lock, &status)) return status;
  charge(kPoolFree, kFreeUs);
  const Stream* stream = stream_of(handle);
  if (stream != nullptr && graph_memory_.contains(address)) return kOk;
  if (refuse_captured(handle, kPoolFree, &status)) return status;
  PieceAt at;
  ModelPool* pool = owner_of(address, &at);
  if (pool == nullptr || stream == nullptr) return {Code::invalid, 0, "pool_free"};
  Piece& piece = at->second;
  if (piece.imports != 0) {
    --piece.imports;
    return kOk;
  }
  piece.used = false;
  pool->free.insert({piece.bytes, address});
  piece.freed_on = handle;
  piece.position = stream->queued;
  piece.moment = stream->tail;
  (*pool)[Attribute::used_mem_current] -= piece.bytes;
  return kOk;
}

// ---- releasing ------------------------------------------------------------------------------------------

// Releases completely free granules whose frees are reached, until at most `keep` is reserved.
void ModelBackend::shrink_pool(ModelPool& pool, std::uint64_t keep) {
  merge_pieces(pool);
  for (auto granule = pool.granules.begin(); granule != pool.granules.end();) {
    const auto [address, bytes] = *granule;
    const Piece& piece = pool.pieces.at(address);
    if (pool[Attribute::reserved_mem_current] <= keep) return;
    if (piece.used || piece.bytes != bytes || !reached(piece) || busy(address, bytes)) {
      ++granule;
      continue;
    }
    ledger_.release(address);
    plain_addresses_.give(address, bytes);
    pool[Attribute::reserved_mem_current] -= bytes;
    pool.free.erase({bytes, address});
    pool.pieces.erase(address);
    granule = pool.granules.erase(granule);
  }
}

// A synchronization point: reached frees are known to be reached, and memory beyond the threshold is
// released.
void ModelBackend::host_has_waited() {
  pools_.each([&](DriverPoolHandle handle, const ModelPool&) {
    ModelPool& pool = *pools_.find(handle);
    for (auto& [address, piece] : pool.pieces) piece.for_all = !piece.used && reached(piece);
    shrink_pool(pool, pool[Attribute::release_threshold]);
  });
}

Status ModelBackend::pool_trim(DriverPoolHandle handle, std::uint64_t keep) {
  Lock lock;
  Status status;
  if (!begin(kPoolTrim, &lock, &status)) return status;
  ModelPool* pool = pools_.find(handle);
  if (pool == nullptr || pool->exporter != 0) return {Code::invalid, 0, "pool_trim"};
  shrink_pool(*pool, keep);
  return kOk;
}

// ---- attributes -----------------------------------------------------------------------------------------

Status ModelBackend::pool_get(DriverPoolHandle handle, Attribute attribute, std::uint64_t* out) {
  Lock lock;
  Status status;
  if (!begin(kPoolGet, &lock, &status)) return status;
  ModelPool* pool = pools_.find(handle);
  if (pool == nullptr) return {Code::invalid, 0, "pool_get"};
  *out = (*pool)[attribute];
  return kOk;
}

Status ModelBackend::pool_set(DriverPoolHandle handle, Attribute attribute, std::uint64_t value) {
  Lock lock;
  Status status;
  if (!begin(kPoolSet, &lock, &status)) return status;
  ModelPool* pool = pools_.find(handle);
  const bool high = attribute == Attribute::reserved_mem_high || attribute == Attribute::used_mem_high;
  const bool settable = is_flag(attribute) ? value <= 1 : high ? value == 0 : true;
  const bool counted =
      attribute == Attribute::reserved_mem_current || attribute == Attribute::used_mem_current;
  if (pool == nullptr || counted || !settable) return {Code::invalid, 0, "pool_set"};
  (*pool)[attribute] = value;
  note_high(*pool);
  return kOk;
}

Status ModelBackend::pool_open(DriverPoolHandle handle, int device) {
  Lock lock;
  Status status;
  if (!begin(kPoolOpen, &lock, &status)) return status;
  ModelPool* pool = pools_.find(handle);
  if (pool == nullptr) return {Code::invalid, 0, "pool_open"};
  pool->opened.insert(device);
  return kOk;
}

// ---- sharing --------------------------------------------------------------------------------------------

Status ModelBackend::pool_export(DriverPoolHandle handle, int* fd) {
  Lock lock;
  Status status;
  if (!begin(kPoolExport, &lock, &status)) return status;
  const ModelPool* pool = pools_.find(handle);
  if (pool == nullptr || !pool->properties.shareable) return {Code::invalid, 0, "pool_export"};
  const Exported exported{this, handle, 0};
  const int made = memfd_create("vram-model-pool", MFD_CLOEXEC);
  if (made < 0) return {Code::failed, 0, "pool_export"};
  if (pwrite(made, &exported, sizeof exported, 0) != sizeof exported) {
    ::close(made);
    return {Code::failed, 0, "pool_export"};
  }
  *fd = made;
  return kOk;
}

Status ModelBackend::pool_import(int fd, DriverPoolHandle* out) {
  Lock lock;
  Status status;
  if (!begin(kPoolImport, &lock, &status)) return status;
  Exported exported;
  const bool read = pread(fd, &exported, sizeof exported, 0) == sizeof exported;
  if (!read || exported.model != this || pools_.find(exported.pool) == nullptr)
    return {Code::invalid, 0, "pool_import"};
  ModelPool pool;
  pool.exporter = exported.pool;
  *out = pools_.add(std::move(pool));
  return kOk;
}

Status ModelBackend::pool_export_pointer(Address address, SharedPointer* out) {
  Lock lock;
  Status status;
  if (!begin(kPoolExportPointer, &lock, &status)) return status;
  PieceAt at;
  const ModelPool* owner = owner_of(address, &at);
  if (owner == nullptr || !owner->properties.shareable) return {Code::invalid, 0, "pool_export_pointer"};
  Exported exported{this, 0, address};
  pools_.each([&](DriverPoolHandle handle, const ModelPool& pool) {
    if (&pool == owner) exported.pool = handle;
  });
  out->fill(0);
  std::memcpy(out->data(), &exported, sizeof exported);
  return kOk;
}

Status ModelBackend::pool_import_pointer(DriverPoolHandle handle, const SharedPointer& pointer,
                                         Address* out) {
  Lock lock;
  Status status;
  if (!begin(kPoolImportPointer, &lock, &status)) return status;
  Exported exported;
  std::memcpy(&exported, pointer.data(), sizeof exported);
  const ModelPool* pool = pools_.find(handle);
  PieceAt at;
  const bool ours = pool != nullptr && exported.model == this && pool->exporter == exported.pool;
  if (!ours || owner_of(exported.address, &at) == nullptr) return {Code::invalid, 0, "pool_import_pointer"};
  ++at->second.imports;
  *out = exported.address;
  return kOk;
}

// ---- check ----------------------------------------------------------------------------------------------

bool ModelBackend::check_pools(std::string* why) const {
  const char* what = nullptr;
  pools_.each([&](DriverPoolHandle, const ModelPool& given) {
    ModelPool pool = given;
    std::uint64_t used = 0, reserved = 0;
    for (const auto& [address, bytes] : pool.granules) {
      reserved += bytes;
      Address end = address;
      for (auto at = pool.pieces.find(address); at != pool.pieces.end() && end < address + bytes; ++at) {
        if (at->first != end) break;
        used += at->second.used ? at->second.bytes : 0;
        end += at->second.bytes;
      }
      if (end != address + bytes) what = "the pieces of a driver pool do not tile its memory";
    }
    std::uint64_t listed = 0;
    for (const auto& [bytes, address] : pool.free) {
      const auto at = pool.pieces.find(address);
      if (at == pool.pieces.end() || at->second.used || at->second.bytes != bytes)
        what = "a driver pool lists a free piece that is none";
      listed += bytes;
    }
    if (listed != reserved - used) what = "a driver pool does not list all free pieces";
    if (used != pool[Attribute::used_mem_current]) what = "a driver pool miscounts what is used";
    if (reserved != pool[Attribute::reserved_mem_current]) what = "a driver pool miscounts what is reserved";
  });
  if (what != nullptr && why != nullptr) *why = what;
  return what == nullptr;
}

}  // namespace vram
