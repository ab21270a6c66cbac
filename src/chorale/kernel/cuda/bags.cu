// Bags of rows of a table: bag b holds the indices from offsets[b] up to the next offset, or to the last index.
struct Bags {
  const i64* indices;
  const i64* offsets;
  i64 count, given, bags;  // indices, offsets, bags
  i64 rows, columns;       // of the table
  i64 padding;             // a row that is left out; -1: none
  Fault* fault;
  i64 row;
  __device__ __forceinline__ i64 begin(i64 bag) const { return clamped(bag); }
  __device__ __forceinline__ i64 end(i64 bag) const { return bag + 1 < given ? clamped(bag + 1) : count; }
  // The row of an index, or -1: left out, or reported.
  __device__ __forceinline__ i64 row_at(i64 i) const {
    const i64 found = indices[i];
    if (found >= 0 && found < rows) return found == padding ? -1 : found;
    report(fault, (i32)row, i, found, rows);
    return -1;
  }
  __device__ __forceinline__ i64 clamped(i64 at) const {
    const i64 offset = offsets[at];
    if (offset >= 0 && offset <= count && (at == 0 ? offset == 0 : offset >= offsets[at - 1])) return offset;
    report(fault, (i32)row, at, offset, count);
    return offset < 0 ? 0 : count;
  }
};
// kMode: BagMode in kernel/index_attrs.h. A block per bag.
template <class T, int kMode>
__global__ void bag_rows(const T* table, const Compute<T>* weights, T* out, i64* picked, const Bags b) {
  typedef Compute<T> C;
  for (i64 bag = blockIdx.x; bag < b.bags; bag += gridDim.x) {
    const i64 begin = b.begin(bag), end = b.end(bag);
    for (i64 column = threadIdx.x; column < b.columns; column += blockDim.x) {
      C sum = 0;
      i64 found = 0, from = -1;
      for (i64 i = begin; i < end; ++i) {
        const i64 row = b.row_at(i);
        if (row < 0) continue;
        const C value = widen(table[row * b.columns + column]);
        if (kMode != 2) {
          sum += weights ? weights[i] * value : value;
        } else if (found == 0 || value > sum) {
          sum = value;
          from = row;
        }
        ++found;
      }
      if (kMode == 1) sum /= (C)(found > 0 ? found : 1);
      out[bag * b.columns + column] = cast<T>(sum);
      if (kMode == 2) picked[bag * b.columns + column] = from;
    }
  }
}
// What the row of each index gets of its bag's gradient. A block per bag.
template <class T, int kMode>
__global__ void spread_bags(const T* dy, const T* weights, T* list, const Bags b) {
  for (i64 bag = blockIdx.x; bag < b.bags; bag += gridDim.x) {
    const i64 begin = b.begin(bag), end = b.end(bag);
    i64 found = 0;
    if (kMode == 1) {
      for (i64 i = begin; i < end; ++i) found += b.indices[i] != b.padding ? 1 : 0;
    }
    const T share = kMode == 1 ? T(1) / (T)(found > 0 ? found : 1) : T(1);
    for (i64 i = begin; i < end; ++i) {
      const T factor = weights ? weights[i] : share;
      for (i64 column = threadIdx.x; column < b.columns; column += blockDim.x)
        list[i * b.columns + column] = factor * dy[bag * b.columns + column];
    }
  }
}
// Gradients of weights: a block per bag.
template <class T>
__global__ void bag_weights(const T* dy, const T* table, T* out, const Bags b) {
  typedef Compute<T> C;
  for (i64 bag = blockIdx.x; bag < b.bags; bag += gridDim.x) {
    const i64 begin = b.begin(bag), end = b.end(bag);
    for (i64 i = begin; i < end; ++i) {
      const i64 row = b.row_at(i);
      C dot = 0;
      for (i64 column = threadIdx.x; row >= 0 && column < b.columns; column += blockDim.x)
        dot += widen(dy[bag * b.columns + column]) * widen(table[row * b.columns + column]);
      dot = over_block<Plus>(dot, C(0));
      if (threadIdx.x == 0) out[i] = cast<T>(dot);
    }
  }
}
// Rows that were picked: those of empty bags become row 0 with nothing to add.
template <class T>
__global__ void clean_picked(const T* dy, const i64* picked, T* list, i64* index, i64 elems) {
  FOR_EACH_ELEMENT(i, elems) {
    index[i] = picked[i] < 0 ? 0 : picked[i];
    list[i] = picked[i] < 0 ? T(0) : dy[i];
  }
}
