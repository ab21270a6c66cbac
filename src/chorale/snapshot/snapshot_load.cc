#include <algorithm>
#include <set>

#include "chorale/autograd/autograd.h"
#include "chorale/base/crc32c.h"
#include "chorale/base/did_you_mean.h"
#include "chorale/io/safetensors.h"
#include "chorale/op/copy.h"
#include "chorale/snapshot/agreement.h"

namespace chorale::snapshot {
namespace {

std::span<const std::byte> bytes_of_saved(const Tensor& x) {
  return {static_cast<const std::byte*>(x.raw()), static_cast<size_t>(x.elems()) * x.elem_bytes()};
}

// The files of a checkpoint, opened when they are needed. They are mapped: only what is touched is read.
class Files {
 public:
  Files(const std::filesystem::path& folder, const Index& index) : folder_(folder), index_(index) {}

  const io::SafetensorsFile& at(const std::string& name) {
    const auto found = open_.find(name);
    if (found != open_.end()) return found->second;
    const auto path = folder_ / name;
    std::error_code error;
    const auto bytes = std::filesystem::file_size(path, error);
    CHORALE_CHECK(!error, "[checkpoint] ", path.string(),
                  " is missing, or no regular file, and the index names it: ", error.message());
    CHORALE_CHECK(static_cast<int64_t>(bytes) == index_.files.at(name), "[checkpoint] ", path.string(),
                  " is damaged: it has ", bytes, " bytes instead of ", index_.files.at(name));
    return open_.emplace(name, io::SafetensorsFile(path, true)).first->second;
  }
  // A saved part, checked against what the index says of it.
  Tensor load(const std::string& key, const SavedChunk& chunk, DType dtype) {
    const Tensor x = at(chunk.file).load(chunk.name);
    CHORALE_CHECK(x.sizes() == chunk.region.sizes && x.dtype() == dtype, "[checkpoint] ",
                  (folder_ / chunk.file).string(), " is damaged: ", chunk.name, ", a part of ", key, ", is ", x.dtype(),
                  " ", x.sizes(), ", and the index says ", dtype, " ", chunk.region.sizes);
    return x;
  }
  // Compares a part with its checksum, where it has one.
  void check(const std::string& key, const SavedChunk& chunk, DType dtype) {
    const Tensor x = load(key, chunk, dtype);
    if (!chunk.checksum) return;
    check_sum(key, chunk, crc32c(bytes_of_saved(x)));
  }
  void check_sum(const std::string& key, const SavedChunk& chunk, uint32_t found) const {
    CHORALE_CHECK(found == *chunk.checksum, "[checkpoint] ", (folder_ / chunk.file).string(),
                  " is damaged: the checksum of ", chunk.name, ", a part of ", key, ", is ", found,
                  ", and the index says ", *chunk.checksum);
  }
  // Fills a region of a tensor from the parts that have some of it.
  void fill(const std::string& key, const SavedTensor& saved, const std::vector<ReadItem>& items, const Region& region,
            const Tensor& into, Verify verify) {
    for (const ReadItem& item : items) {
      const SavedChunk& chunk = saved.chunks[item.chunk];
      const Tensor to = part_of(into, region, item.region), x = load(key, chunk, saved.dtype),
                   from = part_of(x, chunk.region, item.region);
      const bool sums = verify == Verify::kMeanwhile && chunk.checksum && item.region == chunk.region;
      // What was compared first is mapped already. Anything else that is copied as it stands is read into its place.
      const bool reads = verify != Verify::kFirst && to.device() == kCpu && to.dtype() == x.dtype() &&
                         to.is_contiguous() && from.is_contiguous() && to.elems() > 0;
      if (!reads) {
        if (sums) check(key, chunk, saved.dtype);
        copy_(to, from);
        continue;
      }
      to.storage()->check_writable("load");
      to.storage()->note_write("load");
      const auto begin = static_cast<size_t>(from.offset() - x.offset()) * x.elem_bytes();
      const uint32_t sum =
          at(chunk.file).read(chunk.name, begin, {static_cast<std::byte*>(to.raw()), bytes_of_saved(to).size()}, sums);
      if (sums) check_sum(key, chunk, sum);
    }
  }
  std::string bytes(const std::string& key, const SavedChunk& chunk, Verify verify) {
    if (verify == Verify::kMeanwhile) check(key, chunk, DType::kU8);
    const Tensor x = load(key, chunk, DType::kU8);
    return {static_cast<const char*>(x.raw()), static_cast<size_t>(x.elems())};
  }

 private:
  const std::filesystem::path& folder_;
  const Index& index_;
  std::map<std::string, io::SafetensorsFile> open_;
};

struct Reads {
  const SavedTensor* saved;
  std::vector<ReadItem> items;
};

// Compares checksums of the parts of which this rank reads all, or of all that there are, where it reads for others.
void check_reads(Files& files, const Index& index, const State& state, const std::vector<Reads>& copies, bool all) {
  std::set<const SavedChunk*> seen;  // copies of a tensor read the same parts
  const auto check = [&](const std::string& key, const SavedChunk& chunk, DType dtype) {
    if (seen.insert(&chunk).second) files.check(key, chunk, dtype);
  };
  if (all) {
    for (const auto& [key, saved] : index.tensors) {
      for (const SavedChunk& chunk : saved.chunks) check(key, chunk, saved.dtype);
    }
  }
  for (size_t i = 0; i < copies.size(); ++i) {
    for (const ReadItem& item : copies[i].items) {
      const SavedChunk& chunk = copies[i].saved->chunks[item.chunk];
      if (item.region == chunk.region) check(state.chunks[i].key, chunk, copies[i].saved->dtype);
    }
  }
  for (const auto& [key, chunk] : index.bytes) {
    if (all || state.bytes.contains(key)) check(key, chunk, DType::kU8);
  }
}

comm::Value to_value(const Region& region) {
  comm::List offsets, sizes;
  for (const int64_t n : region.offsets) offsets.emplace_back(n);
  for (const int64_t n : region.sizes) sizes.emplace_back(n);
  return comm::List{offsets, sizes};
}
Region region_in(const comm::Value& value) {
  Region region;
  const auto& lists = value.as<comm::List>();
  for (const comm::Value& n : lists[0].as<comm::List>()) region.offsets.push_back(n.as<int64_t>());
  for (const comm::Value& n : lists[1].as<comm::List>()) region.sizes.push_back(n.as<int64_t>());
  return region;
}

// The group's first rank reads for one that does not see the folder. All ranks take part, so that all know of failures.
void read_for(const comm::Group& group, size_t blind, Files& files, const Index& index, State& state,
              const std::vector<Reads>& copies, Verify verify) {
  const auto rank = static_cast<size_t>(group.rank());
  const int first = group.global_rank(0), other = group.global_rank(static_cast<int>(blind));
  const std::vector<comm::Value> asked = everywhere(group, Step::kRead, {}, [&]() -> comm::Value {
    if (rank != blind) return {};
    comm::List tensors, bytes;
    for (size_t i = 0; i < copies.size(); ++i) {
      if (!copies[i].items.empty())
        tensors.push_back(comm::List{state.chunks[i].key, to_value(state.chunks[i].region())});
    }
    for (const auto& [key, text] : state.bytes) {
      if (index.bytes.contains(key)) bytes.emplace_back(key);
    }
    return comm::List{tensors, bytes};
  });
  std::vector<Tensor> read;
  const std::vector<comm::Value> answers = everywhere(group, Step::kRead, {}, [&]() -> comm::Value {
    if (rank != 0) return {};
    const auto& lists = asked[blind].as<comm::List>();
    for (const comm::Value& row : lists[0].as<comm::List>()) {
      const auto& key = row.as<comm::List>()[0].as<std::string>();
      const Region region = region_in(row.as<comm::List>()[1]);
      const SavedTensor& saved = index.tensors.at(key);
      read.push_back(Tensor::empty(region.sizes, saved.dtype));
      files.fill(key, saved, plan_read(key, saved, saved.sizes, region), region, read.back(), verify);
    }
    comm::Map bytes;
    for (const comm::Value& key : lists[1].as<comm::List>()) {
      const auto& name = key.as<std::string>();
      bytes[name] = files.bytes(name, index.bytes.at(name), verify);
    }
    return bytes;
  });
  for (const Tensor& x : read) group.send(x, other);
  if (rank != blind) return;
  for (size_t i = 0; i < copies.size(); ++i) {
    if (copies[i].items.empty()) continue;
    const Tensor x = Tensor::empty(state.chunks[i].local.sizes(), copies[i].saved->dtype);
    group.recv(x, first);
    copy_(state.chunks[i].local, x);
  }
  for (const auto& [key, bytes] : answers[0].as<comm::Map>()) state.bytes[key] = bytes.as<std::string>();
}

// A checkpoint as all ranks know it, and the ranks that do not see what the first one sees.
struct Seen {
  Index index;
  std::set<size_t> blind;
};
Seen see(const comm::Group& group, const std::filesystem::path& folder, const std::function<void(Step)>& on_step) {
  const size_t rank = group.is_member() ? static_cast<size_t>(group.rank()) : 0;
  Seen seen;
  std::string text;
  const std::vector<comm::Value> prepared = everywhere(group, Step::kPrepare, on_step, [&]() -> comm::Value {
    try {
      seen.index = find_index(folder);
      text = index_text(seen.index);
    } catch (const Error&) {
      if (rank == 0) throw;
      text.clear();
    }
    return static_cast<int64_t>(crc32c(std::as_bytes(std::span(text.data(), text.size()))));
  });
  for (size_t r = 1; r < prepared.size(); ++r) {
    if (!(prepared[r] == prepared[0])) seen.blind.insert(r);
  }
  if (!seen.blind.empty()) {
    const std::vector<comm::Value> sent = everywhere(
        group, Step::kPrepare, {}, [&]() -> comm::Value { return rank == 0 ? comm::Value(text) : comm::Value(); });
    if (seen.blind.contains(rank)) seen.index = parse_index(index_path(folder).string(), sent[0].as<std::string>());
  }
  return seen;
}

}  // namespace

Index index_of(const comm::Group& group, const std::filesystem::path& folder) { return see(group, folder, {}).index; }

void load(const std::filesystem::path& folder, State& state, const LoadOptions& options) {
  load(comm::Group(), folder, state, options);
}

void load(const comm::Group& group, const std::filesystem::path& folder, State& state, const LoadOptions& options) {
  const NoGrad quiet;
  const size_t rank = group.is_member() ? static_cast<size_t>(group.rank()) : 0;
  const Seen seen = see(group, folder, options.on_step);
  const Index& index = seen.index;
  const std::set<size_t>& blind = seen.blind;
  std::vector<Reads> copies(state.chunks.size());
  everywhere(group, Step::kPlan, options.on_step, [&]() -> comm::Value {
    std::vector<std::string> missing;
    for (size_t i = 0; i < state.chunks.size(); ++i) {
      const TensorChunk& chunk = state.chunks[i];
      CHORALE_CHECK(chunk.local.defined(), "[checkpoint] ", chunk.key, " is an undefined tensor");
      const auto saved = index.tensors.find(chunk.key);
      if (saved == index.tensors.end()) {
        missing.push_back(chunk.key);
        continue;
      }
      copies[i] = {&saved->second, plan_read(chunk.key, saved->second, chunk.whole, chunk.region())};
    }
    for (const auto& [key, bytes] : state.bytes) {
      if (!index.bytes.contains(key)) missing.push_back(key);
    }
    std::vector<std::string> names;
    for (const auto& [key, tensor] : index.tensors) names.push_back(key);
    std::string text;
    for (size_t i = 0; i < missing.size() && i < 8; ++i)
      text += concat(i ? ", " : "", missing[i], missing.size() == 1 ? did_you_mean(missing[i], names) : "");
    CHORALE_CHECK(missing.empty() || options.partial, "[checkpoint] ", folder, " has no ", text,
                  missing.size() > 8 ? concat(" and ", missing.size() - 8, " more") : "",
                  "; allow a partial load to leave them as they are");
    return {};
  });
  Files files(folder, index);
  // All is checked before the first value is replaced, here and on all other ranks: keys, shapes and whether tensors
  // may be written; with kFirst checksums, too.
  everywhere(group, Step::kRead, options.on_step, [&]() -> comm::Value {
    for (const TensorChunk& chunk : state.chunks) {
      if (chunk.local.device() == kCpu) chunk.local.storage()->check_writable("load");
    }
    if (options.verify == Verify::kFirst && !blind.contains(rank))
      check_reads(files, index, state, copies, rank == 0 && !blind.empty());
    return {};
  });
  everywhere(group, Step::kRead, {}, [&]() -> comm::Value {
    if (blind.contains(rank)) return {};
    for (size_t i = 0; i < state.chunks.size(); ++i) {
      const TensorChunk& chunk = state.chunks[i];
      if (!copies[i].saved) continue;
      const bool is_here = chunk.local.device() == kCpu;
      const Tensor host = is_here ? chunk.local : Tensor::empty(chunk.local.sizes(), chunk.local.dtype());
      files.fill(chunk.key, *copies[i].saved, copies[i].items, chunk.region(), host, options.verify);
      if (!is_here) copy_(chunk.local, host);
    }
    for (auto& [key, bytes] : state.bytes) {
      const auto saved = index.bytes.find(key);
      if (saved != index.bytes.end()) bytes = files.bytes(key, saved->second, options.verify);
    }
    return {};
  });
  for (const size_t r : blind) read_for(group, r, files, index, state, copies, options.verify);
}

State read(const std::filesystem::path& folder, const std::string& prefix) {
  return read(folder, [&](const std::string& key) { return key.starts_with(prefix); });
}

State read(const std::filesystem::path& folder, const std::function<bool(const std::string& key)>& is_wanted) {
  const Index index = find_index(folder);
  State state;
  for (const auto& [key, tensor] : index.tensors) {
    if (is_wanted(key))
      state.chunks.push_back(
          {key, tensor.sizes, Shape(tensor.sizes.size()), Tensor::empty(tensor.sizes, tensor.dtype)});
  }
  for (const auto& [key, chunk] : index.bytes) {
    if (is_wanted(key)) state.bytes[key] = " ";
  }
  load(folder, state, {.verify = Verify::kMeanwhile});  // nobody has seen the tensors yet
  return state;
}

std::vector<std::string> verify(const std::filesystem::path& folder) {
  const Index index = find_index(folder);
  Files files(folder, index);
  std::vector<std::string> problems;
  const auto check = [&](const std::string& key, const SavedChunk& chunk, DType dtype) {
    try {
      files.check(key, chunk, dtype);
    } catch (const Error& error) {
      problems.emplace_back(error.what());
    }
  };
  for (const auto& [key, tensor] : index.tensors) {
    for (const SavedChunk& chunk : tensor.chunks) check(key, chunk, tensor.dtype);
  }
  for (const auto& [key, chunk] : index.bytes) check(key, chunk, DType::kU8);
  problems.erase(std::unique(problems.begin(), problems.end()), problems.end());
  return problems;
}

}  // namespace chorale::snapshot
