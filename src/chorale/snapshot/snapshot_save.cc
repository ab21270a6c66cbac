#include <algorithm>
#include <exception>
#include <map>
#include <optional>
#include <random>
#include <thread>

#include "chorale/autograd/autograd.h"
#include "chorale/base/crc32c.h"
#include "chorale/base/log.h"
#include "chorale/io/safetensors.h"
#include "chorale/op/copy.h"
#include "chorale/snapshot/agreement.h"
#include "chorale/snapshot/replaced.h"

namespace chorale::snapshot {
namespace {

std::span<const std::byte> bytes_of(const Tensor& x) {
  return {static_cast<const std::byte*>(x.raw()), static_cast<size_t>(x.elems()) * x.elem_bytes()};
}

comm::Value to_value(const Shape& shape) {
  comm::List list;
  for (const int64_t n : shape) list.emplace_back(n);
  return list;
}
Shape shape_in(const comm::Value& value) {
  Shape shape;
  for (const comm::Value& n : value.as<comm::List>()) shape.push_back(n.as<int64_t>());
  return shape;
}

comm::Value to_value(const WriteItem& item) {
  return comm::Map{{"key", item.key},
                   {"is_bytes", item.is_bytes},
                   {"dtype", std::string(chorale::name_of(item.dtype))},
                   {"whole", to_value(item.whole)},
                   {"offsets", to_value(item.region.offsets)},
                   {"sizes", to_value(item.region.sizes)},
                   {"fingerprint", static_cast<int64_t>(item.fingerprint)}};
}
WriteItem item_in(const comm::Value& value) {
  const auto& map = value.as<comm::Map>();
  return {.key = map.at("key").as<std::string>(),
          .is_bytes = map.at("is_bytes").as<bool>(),
          .dtype = dtype_from_name(map.at("dtype").as<std::string>()),
          .whole = shape_in(map.at("whole")),
          .region = {shape_in(map.at("offsets")), shape_in(map.at("sizes"))},
          .fingerprint = static_cast<uint64_t>(map.at("fingerprint").as<int64_t>())};
}

Tensor on_host(const Tensor& x) { return contiguous(to(x, kCpu)); }

}  // namespace

std::vector<WriteItem> items_of(const State& state, bool with_fingerprints) {
  std::vector<WriteItem> items;
  for (const TensorChunk& chunk : state.chunks) {
    CHORALE_CHECK(chunk.local.defined() && !chunk.local.is_sparse(), "[checkpoint] ", chunk.key,
                  chunk.local.defined() ? " is sparse; save its indices and values" : " is an undefined tensor");
    CHORALE_CHECK(!chunk.local.is_sharded(), "[checkpoint] ", chunk.key, ": ",
                  chunk.local.is_sharded() ? chunk.local.extension()->why_no_bytes(chunk.local) : "",
                  "; state_of() makes chunks of it");
    CHORALE_CHECK(chunk.local.device() != kNull, "[checkpoint] ", chunk.key,
                  " is on the device null, where tensors have no values; materialize() the model first");
    CHORALE_CHECK(!state.bytes.contains(chunk.key), "[checkpoint] ", chunk.key, " is both a tensor and bytes");
    WriteItem item{.key = chunk.key, .dtype = chunk.local.dtype(), .whole = chunk.whole, .region = chunk.region()};
    // Only of whole tensors can copies be expected; reading all values once is cheap beside writing them.
    if (with_fingerprints && item.region == whole_of(chunk.whole))
      item.fingerprint = crc32c(bytes_of(on_host(chunk.local)));
    items.push_back(std::move(item));
  }
  for (const auto& [key, bytes] : state.bytes) {
    CHORALE_CHECK(!bytes.empty(), "[checkpoint] the bytes of ", key, " are empty");
    const Shape sizes{static_cast<int64_t>(bytes.size())};
    items.push_back({.key = key,
                     .is_bytes = true,
                     .whole = sizes,
                     .region = whole_of(sizes),
                     .fingerprint = crc32c(std::as_bytes(std::span(bytes.data(), bytes.size())))});
  }
  return items;
}

namespace {

// The name of a part in its file: the key itself where it is the whole.
std::string name_in_file(const WriteItem& item) {
  return item.region == whole_of(item.whole) ? item.key : concat(item.key, "@", item.region.offsets);
}

// A part on its way into a file.
struct Job {
  size_t rank, item;  // whose list has it, and where
  const WriteItem* what;
  Tensor x;
};
struct Written {
  const Job* job;
  SavedChunk chunk;
};

// What a rank has for an item: u8 for bytes, on the state's own memory.
Tensor tensor_of(const State& state, const std::vector<WriteItem>& items, size_t i) {
  if (!items[i].is_bytes) return on_host(state.chunks[i].local);
  const std::string& bytes = state.bytes.at(items[i].key);
  return Tensor::borrow(std::span(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()), items[i].whole);
}

// A file to be written: its name, and one whose room may be written over.
struct Place {
  std::string name;
  std::filesystem::path spare;
};

// Writes some parts as one file.
std::vector<Written> write_file_of(const std::filesystem::path& folder, const Place& place,
                                   const std::vector<const Job*>& jobs) {
  NamedTensors tensors;
  tensors.reserve(jobs.size());
  for (const Job* job : jobs) tensors.emplace_back(name_in_file(*job->what), job->x);
  const std::vector<uint32_t> checksums = io::save_with_checksums(folder / place.name, tensors, {}, place.spare);
  std::vector<Written> written;
  written.reserve(jobs.size());
  for (size_t i = 0; i < jobs.size(); ++i)
    written.push_back({jobs[i], {jobs[i]->what->region, place.name, tensors[i].first, checksums[i]}});
  return written;
}

// Several files at a time, one for each thread; the first error is rethrown.
std::vector<Written> write_files(const std::filesystem::path& folder, const std::vector<Place>& files,
                                 const std::vector<std::vector<const Job*>>& shares) {
  std::vector<std::vector<Written>> results(shares.size());
  std::vector<std::exception_ptr> errors(shares.size());
  std::vector<std::thread> threads;
  const auto write_one = [&](size_t t) {
    try {
      const NoGrad quiet;
      if (!shares[t].empty()) results[t] = write_file_of(folder, files[t], shares[t]);
    } catch (...) {
      errors[t] = std::current_exception();
    }
  };
  threads.reserve(shares.size());
  for (size_t t = 1; t < shares.size(); ++t) threads.emplace_back(write_one, t);
  write_one(0);
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  std::vector<Written> all;
  for (auto& some : results) all.insert(all.end(), some.begin(), some.end());
  return all;
}

// A file by which ranks find out whether they see the coordinator's folder. On the coordinator it is there while this
// is.
class Marker {
 public:
  explicit Marker(std::filesystem::path path) : path_(std::move(path)) { io::write_file(path_, "\n"); }
  ~Marker() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  Marker(const Marker&) = delete;
  Marker& operator=(const Marker&) = delete;

 private:
  std::filesystem::path path_;
};
}  // namespace

void save(const std::filesystem::path& folder, const State& state, const SaveOptions& options) {
  save(comm::Group(), folder, state, options);
}

void save(const comm::Group& group, const std::filesystem::path& folder, const State& state,
          const SaveOptions& options) {
  const NoGrad quiet;
  const bool alone = !group.is_member();
  const auto rank = static_cast<size_t>(alone ? 0 : group.rank());
  const int own = alone ? 0 : group.global_rank(group.rank());
  const int coordinator = options.coordinator >= 0 ? options.coordinator : alone ? 0 : group.global_rank(0);

  const auto writer = static_cast<size_t>(alone ? 0 : std::max(group.group_rank(coordinator), 0));

  // A number that no other save has, so that files of an older checkpoint stay as they are.
  std::optional<Marker> marker;
  const std::vector<comm::Value> prepared = everywhere(group, Step::kPrepare, options.on_step, [&]() -> comm::Value {
    CHORALE_CHECK(options.threads > 0, "[checkpoint] threads must be positive, not ", options.threads);
    CHORALE_CHECK(alone || group.group_rank(coordinator) >= 0, "[checkpoint] the coordinator, rank ", coordinator,
                  ", is not in the group");
    if (own != coordinator) return {};
    std::filesystem::create_directories(folder);
    CHORALE_CHECK_STATE(options.overwrite || !has_checkpoint(folder), "[checkpoint] ", folder,
                        " has a checkpoint already; take another folder, or overwrite it");
    const auto number = static_cast<int64_t>(std::random_device()());
    if (!alone && group.size() > 1) marker.emplace(folder / concat(Leftovers::kMarker, number));
    return number;
  });
  const std::string id = std::to_string(prepared[writer].as<int64_t>());
  std::vector<bool> writes(prepared.size(), true);
  if (writes.size() > 1) {
    const std::vector<comm::Value> seen = everywhere(group, Step::kPrepare, {}, [&]() -> comm::Value {
      std::error_code ignored;
      return own == coordinator || std::filesystem::exists(folder / concat(Leftovers::kMarker, id), ignored);
    });
    for (size_t r = 0; r < seen.size(); ++r) writes[r] = seen[r].as<bool>();
  }

  std::vector<WriteItem> items;
  const std::vector<comm::Value> planned = everywhere(group, Step::kPlan, options.on_step, [&]() -> comm::Value {
    items = items_of(state, !alone && group.size() > 1);
    comm::List list;
    for (const WriteItem& item : items) list.push_back(to_value(item));
    return list;
  });
  std::vector<std::vector<WriteItem>> all;
  SavePlan plan;
  everywhere(group, Step::kAgree, options.on_step, [&]() -> comm::Value {
    for (const comm::Value& list : planned) {
      all.emplace_back();
      for (const comm::Value& item : list.as<comm::List>()) all.back().push_back(item_in(item));
    }
    plan = plan_save(all, writes);
    return {};
  });
  for (const std::string& key : plan.differing) {
    if (rank == 0)
      log_warning(concat("[checkpoint] ranks have different values of ", key,
                         "; one of them is saved. Give what differs by rank a key of its own"));
  }

  const auto before = std::count(writes.begin(), writes.begin() + static_cast<std::ptrdiff_t>(rank), true);
  const Leftovers leftovers(folder, static_cast<size_t>(before),
                            static_cast<size_t>(std::count(writes.begin(), writes.end(), true)));
  std::vector<Job> jobs;
  for (const size_t i : plan.writes[rank]) jobs.push_back({rank, i, &items[i], {}});
  for (const SavePlan::Sent& sent : plan.sent) {
    const WriteItem& item = all[sent.rank][sent.item];
    if (sent.rank == rank) group.send(tensor_of(state, items, sent.item), coordinator);
    if (own != coordinator) continue;
    jobs.push_back({sent.rank, sent.item, &item, Tensor::empty(item.region.sizes, item.dtype)});
    group.recv(jobs.back().x, group.global_rank(static_cast<int>(sent.rank)));
  }

  const std::vector<comm::Value> done = everywhere(group, Step::kWrite, options.on_step, [&]() -> comm::Value {
    std::vector<int64_t> bytes;
    bytes.reserve(jobs.size());
    for (Job& job : jobs) {
      if (!job.x.defined()) job.x = tensor_of(state, items, job.item);
      bytes.push_back(job.what->bytes());
    }
    const auto places = balanced(bytes, static_cast<size_t>(options.threads));
    std::vector<std::vector<const Job*>> shares(places.size());
    std::vector<std::filesystem::path> spares;
    if (options.replaced != Replaced::kRemoved) spares = leftovers.kept();
    std::vector<Place> files;
    files.reserve(places.size());
    for (size_t t = 0; t < places.size(); ++t) {
      for (const size_t i : places[t]) shares[t].push_back(&jobs[i]);
      files.push_back({concat(Leftovers::kPart, own, t ? concat("-", t) : "", "-", id, Leftovers::kKind),
                       t < spares.size() ? spares[t] : std::filesystem::path()});
    }
    comm::List list;
    for (const Written& written : write_files(folder, files, shares)) {
      const SavedChunk& chunk = written.chunk;
      const auto size = static_cast<int64_t>(std::filesystem::file_size(folder / chunk.file));
      list.push_back(comm::Map{{"rank", static_cast<int64_t>(written.job->rank)},
                               {"item", static_cast<int64_t>(written.job->item)},
                               {"file", chunk.file},
                               {"file_bytes", size},
                               {"name", chunk.name},
                               {"checksum", int64_t{*chunk.checksum}}});
    }
    return list;
  });

  // Only then is it written: a rank that fails here must not leave a checkpoint.
  everywhere(group, Step::kIndex, options.on_step, []() -> comm::Value { return {}; });
  everywhere(group, Step::kIndex, {}, [&]() -> comm::Value {
    if (own != coordinator) return {};
    Index index;
    for (const auto& list : all) {
      for (const WriteItem& item : list) {
        if (!item.is_bytes) index.tensors.try_emplace(item.key, SavedTensor{item.dtype, item.whole, {}});
      }
    }
    for (const comm::Value& of_rank : done) {
      for (const comm::Value& written : of_rank.as<comm::List>()) {
        const auto& map = written.as<comm::Map>();
        const WriteItem& item =
            all[static_cast<size_t>(map.at("rank").as<int64_t>())][static_cast<size_t>(map.at("item").as<int64_t>())];
        const SavedChunk chunk{item.region, map.at("file").as<std::string>(), map.at("name").as<std::string>(),
                               static_cast<uint32_t>(map.at("checksum").as<int64_t>())};
        index.files[chunk.file] = map.at("file_bytes").as<int64_t>();
        if (item.is_bytes) {
          index.bytes[item.key] = chunk;
        } else {
          index.tensors.at(item.key).chunks.push_back(chunk);
        }
      }
    }
    write_index(folder, index);
    return {};
  });
  everywhere(group, Step::kIndex, {}, [&]() -> comm::Value {
    if (!writes[rank]) return {};
    std::map<std::string, int64_t> named;
    int64_t bytes = 0;
    for (const comm::Value& of_rank : done) {
      for (const comm::Value& written : of_rank.as<comm::List>()) {
        const auto& map = written.as<comm::Map>();
        const int64_t size = map.at("file_bytes").as<int64_t>();
        if (named.emplace(map.at("file").as<std::string>(), size).second) bytes += size;
      }
    }
    const bool keeps = options.replaced == Replaced::kKept ||
                       (options.replaced == Replaced::kAuto && has_memory_for(folder, static_cast<uint64_t>(bytes)));
    leftovers.put_away(named, keeps ? static_cast<size_t>(options.threads) : 0);
    return {};
  });
  everywhere(group, Step::kIndex, {}, [&]() -> comm::Value {
    if (own != coordinator) return {};
    marker.reset();  // before the folder may get another name
    if (options.finish) options.finish();
    return {};
  });
}

}  // namespace chorale::snapshot
