#include "chorale/comm/mpi/mpi_call.h"

#include <algorithm>
#include <cstring>

#include "chorale/base/error.h"
#include "chorale/comm/failure.h"
#include "chorale/vec/combine.h"
#include "chorale/vec/loops.h"

namespace chorale::comm {
namespace {

bool has_chunk_per_rank(CallKind kind) {
  return kind != CallKind::kBroadcast && kind != CallKind::kAllReduce && kind != CallKind::kReduce;
}

bool overlap(const Chunk& a, const Chunk& b) { return a.data < b.data + b.bytes && b.data < a.data + a.bytes; }

template <class T>
void divide(std::byte* data, size_t bytes, int by) {
  auto* values = reinterpret_cast<T*>(data);
  for (size_t i = 0; i < bytes / sizeof(T); ++i) values[i] /= static_cast<T>(by);
}

}  // namespace

std::byte* MpiCall::Buffer::of(size_t bytes) {
  if (bytes > bytes_) {
    data_.reset(new std::byte[bytes]);
    bytes_ = bytes;
  }
  return data_.get();
}

void MpiCall::begin(const base::Intrusive<Operation>& operation, size_t piece_bytes) {
  operation_ = operation;
  // Halves are twice as large on their way. A multiple of the largest element.
  limit_ = piece_bytes / 2 / (has_chunk_per_rank(operation->kind) ? static_cast<size_t>(group_.size()) : 1);
  limit_ = std::max<size_t>(64, limit_ / 64 * 64);
  at_ = end_ = 0;
  stage_ = Stage::kEntering;
  roll_call_ = {};
  enter();
}

void MpiCall::enter() {
  const Operation& operation = *operation_;
  MpiRecord own{.print = operation.print, .number = operation.number};
  own.least = ~uint64_t{0};
  for (const auto* chunks : {&operation.give, &operation.take}) {
    for (const Chunk& chunk : *chunks) {
      own.most = std::max<uint64_t>(own.most, chunk.bytes);
      own.least = std::min<uint64_t>(own.least, chunk.bytes);
    }
  }
  if (!operation.give.empty()) own.given = operation.give[0].bytes;
  records_.resize(static_cast<size_t>(group_.size()));
  records_[static_cast<size_t>(group_.rank())] = own;
  if (operation.kind != CallKind::kMonitoredBarrier) {
    request_ = group_.mpi.all_gather(group_.comm, nullptr, sizeof(own), records_.data());
  } else if (group_.rank() > 0) {
    request_ = group_.mpi.send(group_.comm, 0, kArrivalTag, &records_[static_cast<size_t>(group_.rank())], sizeof(own));
  } else {
    for (size_t r = 1; r < records_.size(); ++r) records_[r].number = 0;
  }
}

// Rank 0 hears from everybody, and everybody else only from rank 0: so rank 0 finds out which ranks are missing.
bool MpiCall::step_monitored_barrier() {
  transport::Mpi& mpi = group_.mpi;
  const Operation& operation = *operation_;
  if (group_.rank() > 0) {
    if (stage_ == Stage::kEntering) {
      request_ = mpi.receive(group_.comm, 0, kGoTag, &records_[0], sizeof(MpiRecord));
      stage_ = Stage::kMoving;
      if (!mpi.test(request_)) return false;
    }
    return true;
  }
  if (stage_ == Stage::kMoving) {
    // The messages that say "go" are sent one after the other: they are small, and leave at once.
    if (++at_ == static_cast<size_t>(group_.size())) return true;
    request_ = mpi.send(group_.comm, static_cast<int>(at_), kGoTag, &records_[0], sizeof(MpiRecord));
    return false;
  }
  while (const auto found = mpi.find(group_.comm, transport::Mpi::kAnySource, kArrivalTag)) {
    auto receiving = mpi.receive_found(*found, &records_[static_cast<size_t>(found->source)]);
    while (!mpi.test(receiving)) {
    }
  }
  const auto has_come = [&](int rank) { return records_[static_cast<size_t>(rank)].number == operation.number; };
  if (!roll_call_.all_have_come(group_.membership, operation, has_come)) return false;
  check_records();
  stage_ = Stage::kMoving;
  return group_.size() == 1;
}

bool MpiCall::step() {
  for (;;) {
    if (request_ != 0 && !group_.mpi.test(request_)) return false;
    if (operation_->kind == CallKind::kMonitoredBarrier) {
      if (step_monitored_barrier()) break;
      if (request_ == 0) return false;
      continue;
    }
    if (stage_ == Stage::kEntering) {
      check_records();
      for (const MpiRecord& record : records_) end_ = std::max<size_t>(end_, record.most);
      if (end_ == 0) break;
      if (operation_->kind == CallKind::kAllToAll && !is_even()) {
        stage_ = Stage::kComparing;
        compare_sizes();
        continue;
      }
    } else if (stage_ == Stage::kComparing) {
      check_sizes();
    } else {
      end_piece();
      at_ += limit_;
      if (at_ >= end_) break;
    }
    stage_ = Stage::kMoving;
    start_piece();
  }
  operation_ = {};
  return true;
}

void MpiCall::abandon() {
  if (request_ != 0) {
    // Kept for ever on purpose: see Note [Calls over MPI].
    struct Abandoned {
      base::Intrusive<Operation> operation;
      std::vector<MpiRecord> records;
      std::vector<uint64_t> sizes, other_sizes;
      Side in, out;
      std::vector<int> elems;
    };
    static std::vector<Abandoned>& kept = *new std::vector<Abandoned>;
    kept.push_back({std::move(operation_), std::move(records_), std::move(sizes_), std::move(other_sizes_),
                    std::move(in_), std::move(out_), std::move(elems_)});
    request_ = 0;
  }
  operation_ = {};
}

void MpiCall::check_records() {
  const Operation& operation = *operation_;
  for (const MpiRecord& record : records_) {
    if (record.print == operation.print && record.number == operation.number) [[likely]]
      continue;
    std::vector<Fingerprint> prints;
    for (const MpiRecord& other : records_) prints.push_back(other.print);
    raise_difference(group_.membership, prints);
  }
  if (!gives_one_chunk(operation.kind) || operation.take.size() != records_.size()) return;
  for (size_t r = 0; r < records_.size(); ++r) {
    if (operation.take[r].bytes == records_[r].given) continue;
    throw CallFailed{concat("rank ", group_.global(static_cast<int>(r)), " gives ", records_[r].given,
                            " bytes where rank ", group_.global(group_.rank()), " takes ", operation.take[r].bytes,
                            ": the sizes of the chunks do not fit"),
                     group_.global(static_cast<int>(r))};
  }
}

bool MpiCall::is_even() const {
  return std::all_of(records_.begin(), records_.end(), [&](const MpiRecord& record) {
    return record.most == records_[0].most && record.least == records_[0].most;
  });
}

void MpiCall::compare_sizes() {
  sizes_.clear();
  for (const Chunk& chunk : operation_->give) sizes_.push_back(chunk.bytes);
  other_sizes_.resize(sizes_.size());
  request_ = group_.mpi.all_to_all(group_.comm, sizes_.data(), sizeof(uint64_t), other_sizes_.data());
}

void MpiCall::check_sizes() {
  for (size_t r = 0; r < other_sizes_.size(); ++r) {
    if (other_sizes_[r] == operation_->take[r].bytes) continue;
    throw CallFailed{concat("rank ", group_.global(static_cast<int>(r)), " gives ", other_sizes_[r],
                            " bytes where rank ", group_.global(group_.rank()), " takes ", operation_->take[r].bytes,
                            ": the sizes of the chunks do not fit"),
                     group_.global(static_cast<int>(r))};
  }
}

Chunk MpiCall::piece_of(const Chunk& chunk) const {
  if (at_ >= chunk.bytes) return {};
  return {chunk.data + at_, std::min(limit_, chunk.bytes - at_)};
}

void MpiCall::lay_out(Side& side, const SmallVector<Chunk, 2>& chunks, const Chunk& other, bool copy_in) {
  side.bytes.clear();
  side.at.clear();
  side.staged = end_ > limit_;
  size_t total = 0;
  const std::byte* next = nullptr;
  for (const Chunk& chunk : chunks) {
    const Chunk piece = piece_of(chunk);
    side.bytes.push_back(static_cast<int>(piece.bytes));
    side.at.push_back(static_cast<int>(total));
    total += piece.bytes;
    if (piece.bytes == 0) continue;
    if (next && piece.data != next) side.staged = true;
    if (!next) side.data = piece.data;
    next = piece.data + piece.bytes;
    if (overlap(chunk, other)) side.staged = true;
  }
  if (!side.staged) return;
  side.data = side.buffer.of(total);
  if (!copy_in) return;
  for (size_t r = 0; r < chunks.size(); ++r) {
    const Chunk piece = piece_of(chunks[r]);
    if (piece.bytes > 0) std::memcpy(side.data + side.at[r], piece.data, piece.bytes);
  }
}

void MpiCall::copy_out(const Side& side, const SmallVector<Chunk, 2>& chunks) const {
  if (!side.staged) return;
  for (size_t r = 0; r < chunks.size(); ++r) {
    const Chunk piece = piece_of(chunks[r]);
    if (piece.bytes > 0) std::memcpy(piece.data, side.data + side.at[r], piece.bytes);
  }
}

// ---- reductions

Reduce MpiCall::reduction() const {
  const Reduce op = operation_->reduction.op;
  return op == Reduce::kAverage ? Reduce::kSum : op;
}

void MpiCall::prepare(const Chunk& piece, std::byte* to) const {
  const auto elems = static_cast<int64_t>(piece.bytes / size_of(operation_->dtype));
  const std::byte* from = piece.data;
  if (is_half()) {
    vec::convert_loop(operation_->dtype, DType::kF32)(from, to, elems);
    from = to;
  }
  if (operation_->reduction.factor != 1) {
    const void* in[] = {from};
    void* out[] = {to};
    vec::combine(Reduce::kSum, travelling(), in, out, elems, operation_->reduction.factor);
  } else if (from != to && elems > 0) {
    std::memmove(to, from, piece.bytes);
  }
}

void MpiCall::conclude(std::byte* from, const Chunk& piece) const {
  const size_t elems = piece.bytes / size_of(operation_->dtype);
  const size_t bytes = elems * size_of(travelling());
  if (operation_->reduction.op == Reduce::kAverage) {
    if (real_of(travelling()) == DType::kF32) {
      divide<float>(from, bytes, group_.size());
    } else {
      divide<double>(from, bytes, group_.size());
    }
  }
  if (is_half()) vec::convert_loop(DType::kF32, operation_->dtype)(from, piece.data, static_cast<int64_t>(elems));
}

void MpiCall::start_reduction() {
  const Operation& operation = *operation_;
  const Chunk from = piece_of(operation.give[0]);
  const size_t elems = from.bytes / size_of(operation.dtype);
  const bool changed = is_half() || operation.reduction.factor != 1;
  const bool takes = !operation.take.empty();
  const Chunk to = takes ? piece_of(operation.take[0]) : Chunk{};
  reduced_ = nullptr;
  const std::byte* in = from.data;
  if (takes) {
    reduced_ = is_half() ? out_.buffer.of(elems * size_of(travelling())) : to.data;
    if (changed) prepare(from, reduced_);
    if (changed || in == reduced_) in = nullptr;
  } else if (changed) {
    prepare(from, in_.buffer.of(elems * size_of(travelling())));
    in = in_.buffer.of(0);
  }
  request_ = operation.kind == CallKind::kAllReduce
                 ? group_.mpi.all_reduce(group_.comm, in, reduced_, elems, travelling(), reduction())
                 : group_.mpi.reduce(group_.comm, in, reduced_, elems, travelling(), reduction(), operation.root);
}

void MpiCall::start_reduce_scatter() {
  const Operation& operation = *operation_;
  const size_t elem = size_of(operation.dtype), width = size_of(travelling());
  const bool changed = is_half() || operation.reduction.factor != 1;
  lay_out(in_, operation.give, operation.take[0], !changed);
  elems_.clear();
  size_t total = 0;
  for (const Chunk& chunk : operation.give) {
    elems_.push_back(static_cast<int>(piece_of(chunk).bytes / elem));
    total += static_cast<size_t>(elems_.back());
  }
  const std::byte* in = in_.data;
  if (changed) {
    std::byte* at = in_.buffer.of(total * width);
    in = at;
    for (const Chunk& chunk : operation.give) {
      const Chunk piece = piece_of(chunk);
      prepare(piece, at);
      at += piece.bytes / elem * width;
    }
  }
  const Chunk to = piece_of(operation.take[0]);
  reduced_ = is_half() ? out_.buffer.of(to.bytes / elem * width) : to.data;
  request_ = group_.mpi.reduce_scatter(group_.comm, in, reduced_, elems_, travelling(), reduction());
}

// ---- pieces

void MpiCall::start_piece() {
  const Operation& operation = *operation_;
  transport::Mpi& mpi = group_.mpi;
  const auto comm = group_.comm;
  const bool root = group_.rank() == operation.root;
  switch (operation.kind) {
    case CallKind::kBroadcast: {
      const Chunk piece = piece_of(root ? operation.give[0] : operation.take[0]);
      request_ = mpi.broadcast(comm, piece.data, piece.bytes, operation.root);
      return;
    }
    case CallKind::kAllReduce:
    case CallKind::kReduce:
      return start_reduction();
    case CallKind::kReduceScatter:
      return start_reduce_scatter();
    case CallKind::kAllGather:
    case CallKind::kNewGroup: {
      const Chunk piece = piece_of(operation.give[0]);
      const bool in_place = operation.give[0].data == operation.take[static_cast<size_t>(group_.rank())].data;
      lay_out(out_, operation.take, in_place ? Chunk{} : operation.give[0], false);
      const std::byte* in = in_place && !out_.staged ? nullptr : piece.data;
      request_ = is_even() ? mpi.all_gather(comm, in, piece.bytes, out_.data)
                           : mpi.all_gather(comm, in, piece.bytes, out_.data, {out_.bytes, out_.at});
      return;
    }
    case CallKind::kGather: {
      const Chunk piece = piece_of(operation.give[0]);
      if (root) lay_out(out_, operation.take, operation.give[0], false);
      request_ = mpi.gather(comm, piece.data, piece.bytes, root ? out_.data : nullptr, operation.root);
      return;
    }
    case CallKind::kScatter: {
      const Chunk piece = piece_of(operation.take[0]);
      if (root) lay_out(in_, operation.give, operation.take[0], true);
      request_ = mpi.scatter(comm, root ? in_.data : nullptr, piece.bytes, piece.data, operation.root);
      return;
    }
    case CallKind::kAllToAll: {
      lay_out(in_, operation.give, {}, true);
      const Chunk in{in_.data, static_cast<size_t>(in_.at.back() + in_.bytes.back())};
      lay_out(out_, operation.take, in_.staged ? Chunk{} : in, false);
      request_ = is_even() ? mpi.all_to_all(comm, in_.data, static_cast<size_t>(in_.bytes[0]), out_.data)
                           : mpi.all_to_all(comm, in_.data, {in_.bytes, in_.at}, out_.data, {out_.bytes, out_.at});
      return;
    }
    default:
      CHORALE_INVARIANT(false, "no way to run ", name_of(operation.kind), " over MPI");
  }
}

void MpiCall::end_piece() {
  const Operation& operation = *operation_;
  switch (operation.kind) {
    case CallKind::kAllReduce:
    case CallKind::kReduce:
    case CallKind::kReduceScatter:
      if (reduced_) conclude(reduced_, piece_of(operation.take[0]));
      return;
    case CallKind::kAllGather:
    case CallKind::kNewGroup:
    case CallKind::kAllToAll:
      return copy_out(out_, operation.take);
    case CallKind::kGather:
      if (group_.rank() == operation.root) copy_out(out_, operation.take);
      return;
    default:
      return;
  }
}

}  // namespace chorale::comm
