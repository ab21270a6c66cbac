// Products of integers; and of nothing (k = 0).
template <class T>
__global__ void integer_product(const Space s, i64 m, i64 n, i64 k, i64 a_row, i64 a_col, i64 b_row, i64 b_col,
                                i64 alpha, i64 beta) {
  FOR_EACH_ELEMENT(i, s.elems * m * n) {
    const i64 batch = i / (m * n), row = i / n % m, column = i % n;
    i64 at[3];
    offsets_at<3>(s, batch, at);
    const T* const a = (const T*)(s.data[1] + at[1]) + row * a_row;
    const T* const b = (const T*)(s.data[2] + at[2]) + column * b_col;
    T* const c = (T*)(s.data[0] + at[0]) + row * n + column;
    u64 sum = 0;
    for (i64 j = 0; j < k; ++j) sum += (u64)a[j * a_col] * (u64)b[j * b_row];
    *c = (T)((u64)alpha * sum + (beta != 0 ? (u64)beta * (u64)*c : 0));
  }
}
