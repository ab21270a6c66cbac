// What several workers do together: all of them tell their leader something, and each gets what all have told.
#include <algorithm>

#include "chorale/rpc/core.h"

namespace chorale::rpc {
namespace {

std::string key_of(const std::vector<std::string>& sorted, uint64_t number) {
  std::string key;
  for (const std::string& name : sorted) key += name + "/";
  return concat(key, number);
}

}  // namespace

// What the leader has, the first of the names.
struct Core::Gathering {
  std::mutex mutex;
  std::map<std::string, Bytes> values;
  std::vector<std::pair<int, uint64_t>> waiting;  // requests of followers
  Future<void> complete;
};

std::shared_ptr<Core::Gathering> Core::gathering(const std::string& key) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Gathering>& entry = gatherings_[key];
  if (!entry) entry = std::make_shared<Gathering>();
  return entry;
}

void Core::barrier(const std::vector<std::string>& names, Timeout timeout) { all_gather(names, {}, timeout); }

std::map<std::string, Bytes> Core::all_gather(const std::vector<std::string>& names, Bytes own, Timeout timeout) {
  std::vector<std::string> sorted = names;
  std::sort(sorted.begin(), sorted.end());
  CHORALE_CHECK(!sorted.empty() && std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end(),
                "[rpc] a barrier needs the names of its workers, each once");
  const std::string& me = own_info_.name;
  CHORALE_CHECK(std::binary_search(sorted.begin(), sorted.end(), me), "[rpc] worker '", me,
                "' is not among those of its barrier");
  std::vector<int> ids;
  ids.reserve(sorted.size());
  for (const std::string& name : sorted) ids.push_back(roster_.find(name).id);
  std::string set = key_of(sorted, 0), key;
  {
    const std::lock_guard lock(mutex_);
    key = key_of(sorted, ++gather_numbers_[set]);
  }
  const Deadline deadline = timeout.count() == 0 ? Deadline::never() : within(timeout);
  Writer writer;
  write(writer, key);
  writer.number<uint64_t>(sorted.size());
  writer.raw(own.data(), own.size());

  if (sorted[0] != me) {
    Future<Bytes> answered(std::make_shared<Future<Bytes>::State>(helper()));
    ++gathers_;
    request(ids[0], {.kind = MessageKind::kGather, .payload = std::move(writer.payload)},
            {.timeout = timeout, .internal = true}, [this, answered](Message message, const std::exception_ptr& error) {
              --gathers_;
              if (error) {
                answered.state()->try_set_error(error);
              } else {
                answered.state()->try_set(std::move(message.payload));
              }
            });
    answered.state()->wait();
    if (answered.has_error()) raise_for_the_dead(ids, answered.state()->error());
    const Bytes bytes = answered.wait();
    Reader reader(bytes, {});
    std::map<std::string, Bytes> values;
    for (size_t count = reader.count(16); count > 0; --count) {
      const auto name = read<std::string>(reader);
      Bytes& value = values[name];
      value.resize(reader.count(1));
      reader.raw(value.data(), value.size());
    }
    return values;
  }

  const std::shared_ptr<Gathering> here = gathering(key);
  add_to_gathering(*here, me, std::move(own), sorted.size());
  fail_gatherings_of_the_gone();
  crew_->wait(*here->complete.state(), deadline);
  const auto forget = [&] {
    const std::lock_guard lock(mutex_);
    gatherings_.erase(key);
  };
  if (!here->complete.is_complete()) {
    forget();
    std::string late;
    const std::lock_guard lock(here->mutex);
    for (const std::string& name : sorted) {
      if (!here->values.contains(name)) late += concat(late.empty() ? "" : ", ", name);
    }
    throw RpcError(RpcErrorKind::kTimeout, own_,
                   concat("[rpc] these workers did not come to the barrier within ",
                          std::chrono::duration<double>(timeout).count(), " s: ", late));
  }
  forget();
  here->complete.wait();
  const std::lock_guard lock(here->mutex);
  return here->values;
}

// A leader that has learnt of a death leaves, and a worker that comes later finds that the leader is gone: the one that
// was gone before it is to be named, if there is one. The word of it may come a little later. A leader that was killed
// is itself to be named, also where others have left because of it.
void Core::raise_for_the_dead(const std::vector<int>& workers, const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const RpcError& known) {
    const int leader = workers[0];
    if (known.kind() != RpcErrorKind::kConnection || known.worker() != leader) throw;
    if (std::string_view(known.what()).find("has left the ") == std::string_view::npos) throw;
    std::optional<std::pair<int, std::string>> dead;
    wait_until(
        [&] {
          const std::lock_guard lock(mutex_);
          for (const int worker : workers) {
            const auto found = gone_.find(worker);
            if (found != gone_.end() && found->first != leader) dead = *found;
          }
          return dead.has_value();
        },
        within(std::chrono::milliseconds(50)));
    if (!dead) throw;
    throw RpcError(RpcErrorKind::kConnection, dead->first, dead->second);
  }
}

void Core::add_to_gathering(Gathering& gathering, const std::string& name, Bytes value, size_t of) {
  Writer all;
  std::vector<std::pair<int, uint64_t>> waiting;
  {
    const std::lock_guard lock(gathering.mutex);
    gathering.values[name] = std::move(value);
    if (gathering.values.size() < of) return;
    all.number<uint64_t>(gathering.values.size());
    for (const auto& [whose, bytes] : gathering.values) {
      write(all, whose);
      all.number<uint64_t>(bytes.size());
      all.raw(bytes.data(), bytes.size());
    }
    waiting.swap(gathering.waiting);
  }
  for (const auto& [to, id] : waiting) answer(to, id, {.kind = MessageKind::kReturn, .payload = all.payload});
  gathering.complete.state()->try_set({});
}

void Core::serve_gather(int from, const Message& request) {
  Reader reader(request.payload, {});
  const auto key = read<std::string>(reader);
  const auto of = reader.number<uint64_t>();
  Bytes value(reader.left());
  reader.raw(value.data(), value.size());
  const std::shared_ptr<Gathering> here = gathering(key);
  {
    const std::lock_guard lock(here->mutex);
    here->waiting.emplace_back(from, request.id);
  }
  add_to_gathering(*here, roster_.known(from).name, std::move(value), of);
  fail_gatherings_of_the_gone();
}

// Fails the waits of this worker; the other workers have other ways to learn of it.
void Core::fail_gathering(Gathering& gathering, const std::exception_ptr& error) {
  gathering.complete.state()->try_set_error(error);
}

// Fails gatherings that began when one of their workers was known to be gone.
void Core::fail_gatherings_of_the_gone() {
  std::map<int, std::string> gone;
  {
    const std::lock_guard lock(mutex_);
    gone = gone_;
  }
  for (const auto& [worker, reason] : gone) fail_gatherings(worker, reason);
}

void Core::fail_gatherings(int worker, const std::string& reason) {
  std::vector<std::shared_ptr<Gathering>> all;
  const std::string name = roster_.known(worker).name;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, gathering] : gatherings_) {
      if (("/" + key).find("/" + name + "/") != std::string::npos) all.push_back(gathering);
    }
  }
  for (const auto& gathering : all) {
    std::vector<std::pair<int, uint64_t>> waiting;
    {
      const std::lock_guard lock(gathering->mutex);
      if (gathering->values.contains(name)) continue;
      waiting.swap(gathering->waiting);
    }
    const auto error = std::make_exception_ptr(RpcError(RpcErrorKind::kConnection, worker, reason));
    for (const auto& [to, id] : waiting) answer_error(to, id, error);
    gathering->complete.state()->try_set_error(error);
  }
}

}  // namespace chorale::rpc
