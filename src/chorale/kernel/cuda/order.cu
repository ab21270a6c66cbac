// Sorting by keys: unsigned integers in the order of the elements. NaN comes last, and both zeros are equal.
template <class T>
__device__ __forceinline__ u64 key_of(T value) {
  if constexpr (kIsFloating<T> || IsSame<T, f16>::value || IsSame<T, bf16>::value) {
    u64 bits = 0, sign = 1ull << (8 * sizeof(T) - 1);
    const u64 all = sign | (sign - 1);
    if constexpr (IsSame<T, double>::value) bits = (u64)__double_as_longlong(value);
    if constexpr (IsSame<T, float>::value) bits = __float_as_uint(value);
    if constexpr (sizeof(T) == 2) bits = *(const unsigned short*)&value;
    const u64 magnitude = bits & ~sign;
    const auto wide = widen(value);
    if (wide != wide) return all;
    return bits != magnitude && magnitude != 0 ? magnitude ^ (sign - 1) : magnitude ^ sign;
  } else if constexpr (IsSame<T, bool>::value) {
    return value ? 1 : 0;
  } else {
    return (u64)(i64)value ^ (1ull << 63);
  }
}
struct Entry {
  u64 key, index;
};
__device__ __forceinline__ bool lies_before(const Entry& a, const Entry& b) {
  return a.key != b.key ? a.key < b.key : a.index < b.index;
}
// Lines of x [outer, length, inner] become lines of `width` entries, a power of two: the rest comes last.
template <class T>
__global__ void make_entries(const T* x, Entry* entries, i64 lines, i64 length, i64 inner, i64 width, i64 descending) {
  FOR_EACH_ELEMENT(i, lines * width) {
    const i64 line = i / width, at = i % width;
    Entry made = {~0ull, (u64)at};
    if (at < length) {
      const u64 key = key_of(x[(line / inner * length + at) * inner + line % inner]);
      made.key = descending ? ~key : key;
    }
    entries[i] = made;
  }
}
// One step of a bitonic sort: pairs `apart` from each other, runs of `run` in turn up and down.
template <int kUnused>
__global__ void sort_step(Entry* entries, i64 count, i64 width, i64 run, i64 apart) {
  FOR_EACH_ELEMENT(i, count / 2) {
    const i64 low = i / apart * apart * 2 + i % apart, high = low + apart;
    const Entry a = entries[low], b = entries[high];
    const bool up = (low % width & run) == 0;
    if (lies_before(b, a) == up) {
      entries[low] = b;
      entries[high] = a;
    }
  }
}
template <class T>
__global__ void take_sorted(const T* x, const Entry* entries, T* values, i64* indices, i64 lines, i64 length, i64 inner,
                            i64 width, i64 taken) {
  FOR_EACH_ELEMENT(i, lines * taken) {
    const i64 j = i % inner, at = i / inner % taken, outer = i / inner / taken, line = outer * inner + j;
    const i64 index = (i64)entries[line * width + at].index;
    values[i] = x[(outer * length + index) * inner + j];
    indices[i] = index;
  }
}
// How many of n sorted elements lie before each value; `rows` lists, or one for all.
template <class T>
__global__ void search_sorted(const T* lists, const T* values, i64* found, i64 count, i64 n, i64 per_row, i64 right) {
  FOR_EACH_ELEMENT(i, count) {
    const T* const list = lists + i / per_row * n;
    const u64 key = key_of(values[i]);
    const auto wide = widen(values[i]);
    const bool inclusive = right || wide != wide;
    i64 low = 0, high = n;
    while (low < high) {
      const i64 middle = (low + high) / 2;
      const u64 other = key_of(list[middle]);
      if (other < key || (inclusive && other == key)) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    found[i] = low;
  }
}
