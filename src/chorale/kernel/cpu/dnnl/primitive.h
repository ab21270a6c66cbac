// oneDNN primitives: made once per shape and thread, run with pointers.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <oneapi/dnnl/dnnl.hpp>
#include <unordered_map>
#include <vector>

#include "chorale/base/dtype.h"

namespace chorale::kernel::cpu::dnnl {

const ::dnnl::engine& engine();

// oneDNN's name for f32 or bf16, the dtypes that we give it.
::dnnl::memory::data_type type_of(DType dtype);

// A compiled primitive together with the descriptors of its arguments. Not thread-safe: the arguments' addresses live
// in it.
class Primitive {
 public:
  Primitive() = default;  // runs nothing
  // Arguments in the order in which run() takes their addresses; `kind` is one of DNNL_ARG_*.
  struct Argument {
    int kind;
    ::dnnl::memory::desc desc;
  };
  // `primitive` was built with a scratchpad of the caller's, described by `scratchpad`.
  Primitive(const ::dnnl::primitive& primitive, const ::dnnl::memory::desc& scratchpad,
            std::initializer_list<Argument> arguments);

  explicit operator bool() const { return !arguments_.empty(); }
  // Returns when the work is done. Throws InternalError if oneDNN refuses.
  void run(std::initializer_list<const void*> addresses);

 private:
  ::dnnl::primitive primitive_;
  std::vector<::dnnl::memory> memories_;    // own what arguments_ point to
  std::vector<dnnl_exec_arg_t> arguments_;  // the scratchpad is the last one
  size_t scratch_bytes_ = 0;
};

// Everything that a primitive depends on, as numbers. The number of threads is one of them, always.
class Key {
 public:
  Key(std::initializer_list<int64_t> words);
  friend bool operator==(const Key& a, const Key& b) { return a.words_ == b.words_; }
  size_t hash() const { return hash_; }

 private:
  std::array<int64_t, 32> words_{};
  size_t hash_ = 0;
};
struct KeyHash {
  size_t operator()(const Key& key) const { return key.hash(); }
};

// As long as it lives, oneDNN builds primitives of the calling thread for as many threads as they may use when they run
// here: one inside a parallel region, thread_count() elsewhere.
class BuildingThreads {
 public:
  static int count();
  BuildingThreads();
  ~BuildingThreads();
  BuildingThreads(const BuildingThreads&) = delete;
  BuildingThreads& operator=(const BuildingThreads&) = delete;

 private:
  int before_;
};

// How often the caches of the calling thread were asked, and how often they had to build.
struct CacheCounts {
  uint64_t lookups = 0, built = 0;
};
CacheCounts& cache_counts();

// Entries by key, for one thread: no locks, and no sharing of argument addresses. Compiled code is shared all the same,
// by oneDNN's own process-wide cache, so a second thread pays microseconds for a shape that a first one has used.
template <class Entry>
class Cache {
 public:
  // Beyond this many shapes everything is forgotten; a program that has more will not notice.
  static constexpr size_t kCapacity = 1024;

  // The entry of `key`, made by make() at the first call. If make() throws, nothing is kept.
  template <class Make>
  Entry& get(const Key& key, Make&& make) {
    ++cache_counts().lookups;
    if (last_ != nullptr && last_->first == key) return last_->second;
    auto found = entries_.find(key);
    if (found == entries_.end()) {
      ++cache_counts().built;
      const BuildingThreads threads;
      Entry entry = make();
      if (entries_.size() >= kCapacity) entries_.clear();
      found = entries_.emplace(key, std::move(entry)).first;
    }
    last_ = &*found;
    return last_->second;
  }
  size_t size() const { return entries_.size(); }

 private:
  std::unordered_map<Key, Entry, KeyHash> entries_;
  std::pair<const Key, Entry>* last_ = nullptr;
};

}  // namespace chorale::kernel::cpu::dnnl
