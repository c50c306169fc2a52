// Runs score programs (cpu/_score.py) on tiles of S, between the score product and the softmax.
//
// The kernels compute S = q.k and pass a whole tile of it. The program replaces it by f(scale * q.k), which the softmax
// reads with scale 1. Operations that depend only on the query, the key or the distance run once per row, column or
// diagonal. Others run on strips of a few rows, so that their registers stay in the L1 cache. The kernels mask the
// results, so f may return anything for a masked pair. A NaN of an allowed pair sends its row to the float64 fallback.
// Where the softmax would lose the NaN, apply() stores +inf instead.
#pragma once
#include <utility>

#include "kernels.h"
#include "simd/blocking.h"
#include "simd/vec.h"
#include "softmax/operations.h"
#include "softmax/table_gradients.h"
#include "tile/arena.h"
#include "tile/tile.h"

namespace spattn {
namespace SPATTN_ISA {

// Positions that are evenly spaced except for trailing padding.
struct Spacing {
  int64_t start = 0, step = 0, count = 0;
  bool even = true;

  Spacing() = default;
  Spacing(const int64_t* position, int64_t cells) : count(cells) {
    while (count && position[count - 1] == kPadding) --count;
    if (!count) return;
    start = position[0];
    step = count > 1 ? position[1] - position[0] : 0;
    int64_t strange = 0;
    for (int64_t i = 0; i + 1 < count; ++i) strange |= (position[i + 1] - position[i]) ^ step;
    even = !strange;
  }
};

// A score function that is `factor` times the product plus a register, which a kernel can apply to its accumulators.
template <class T> struct LinearScore {
  bool possible = false;
  T factor = 1;
  Source<T> rest = {};

  // Applies it to the vector from `column` on in row `row` of the tile.
  SPATTN_INLINE Vec<T> operator()(Vec<T> product, int64_t row, int64_t column) const {
    const T* const at = rest.data + row * rest.step;
    return product * factor + (rest.vector ? load<Vec<T>>(at + column) : splat(*at));
  }
};

// The score function of a call, with the registers of a tile. A Score without a program is false and owns nothing.
template <class T> class Score {
  static constexpr int64_t L = kLanes<T>, kStrip = 4096 / sizeof(T);

 public:
  // For tiles of at most `rows` x `lanes` pairs and `heads` query heads.
  Score(const Call& call, int64_t rows, int64_t lanes, int64_t heads, Arena& arena)
      : call_(call), program_(call.score), tile_ld_(round_up(lanes, L)), tile_size_(rows * tile_ld_),
        line_(round_up(rows > lanes ? rows : lanes, L)), diagonal_(round_up(rows + lanes, L) + L),
        strip_(kStrip > tile_ld_ ? kStrip : tile_ld_) {
    if (!program_) return;
    const int32_t* count = program_->registers;
    scalars_ = arena.array<T>(heads * count[kScalars] * L);
    lines_[0] = arena.array<T>(count[kQueries] * line_);
    lines_[1] = arena.array<T>(count[kKeys] * line_);
    diagonals_ = arena.array<T>(count[kDiagonals] * diagonal_);
    strips_ = arena.array<T>(count[kPairs] * strip_);
    tiles_ = arena.array<T>(count[kTiles] * tile_size_);
    sources_ = arena.array<Source<T>>(program_->most_axes);
    terms_ = arena.array<T>(kDiagonalChains * diagonal_);
  }

  explicit operator bool() const { return program_ != nullptr; }

  // Computes the scalars of a query head in `slot`, below the number of heads.
  void begin(int64_t batch, int64_t head, int64_t slot = 0) {
    if (!program_) return;
    batch_ = batch, head_ = head, slot_ = slot;
    for (int32_t i = 0; i < program_->scalars; ++i) {
      const Instruction& own = program_->instructions[i];
      run(own, {scalars(slot) + index(own.out) * L, 0, 1, L},
          [&](int32_t operand) { return Source<T>{scalars(slot) + index(operand) * L, 0, true}; });
    }
  }

  // Replaces the products in `scores`, (count, columns), by scores. `rows` and `lanes` are the positions along the rows
  // and columns, kPadding for padding. Rows are keys or, if kKeysInLanes, queries; `columns` is a multiple of kLanes.
  // finish(column, row, count, score) stores the vector from `column` on of `count` rows from `row` on; score(row)
  // returns its value, which may be NaN.
  template <bool kKeysInLanes, class Finish>
  void apply(const int64_t* rows, int64_t count, const int64_t* lanes, int64_t columns, T* scores, int64_t ld,
             int64_t slot, const Finish& finish) {
    place<kKeysInLanes>(rows, count, lanes, columns, scores, ld, slot);
    run_pairs(finish);
  }

  // Sets the tile, and runs the operations that depend only on its rows, its columns or its diagonals.
  template <bool kKeysInLanes>
  void place(const int64_t* rows, int64_t count, const int64_t* lanes, int64_t columns, T* scores, int64_t ld,
             int64_t slot) {
    keys_in_lanes_ = kKeysInLanes, slot_ = slot;
    rows_ = count, columns_ = columns, row_position_ = rows, lane_position_ = lanes;
    products_ = scores, products_ld_ = ld;
    variant_ = program_->variants;
    if (program_->registers[kDiagonals]) {
      row_ = Spacing(rows, count), lane_ = Spacing(lanes, columns);
      step_ = lane_.count > 1 ? lane_.step : row_.step;
      const bool one_step = row_.count <= 1 || lane_.count <= 1 || row_.step == lane_.step;
      if (!row_.even || !lane_.even || !one_step) ++variant_;
    }
    const int32_t of_lines[2] = {program_->scalars, variant_->lines};
    run_list(of_lines, [&](const Instruction& own) {
      const int side = space(own.out);
      const int64_t length = round_up(in_lanes(side) ? columns_ : rows_, L);
      run(own, {line(own.out), 0, 1, length}, [&](int32_t operand) { return line_source(operand); });
    });
    run_list(variant_->diagonals, [&](const Instruction& own) {
      run(own, {line(own.out), 0, 1, round_up(rows_ + columns_ - 1, L)},
          [&](int32_t operand) { return line_source(operand); });
    });
  }

  // Returns the score function on the tile of place(), if it is linear in the product. The first row of that tile has
  // number `first_row` in the result.
  LinearScore<T> linear(int64_t first_row) const {
    LinearScore<T> found;
    const Instruction& own = program_->instructions[variant_->pairs[0]];
    if (variant_->pairs[1] != variant_->pairs[0] + 1 || own.out != variant_->value || space(own.out) != kPairs) {
      return found;
    }
    found.possible = (own.operation == k_multiply_add_f || own.operation == k_mul_f) &&
                     space(own.operands[0]) == kProducts && space(own.operands[1]) == kScalars;
    if (!found.possible) return found;
    found.factor = *pair_source(own.operands[1], 0).data;
    found.rest = own.operation == k_mul_f ? Source<T>{zeros_, 0, false} : pair_source(own.operands[2], 0);
    found.rest.data -= first_row * found.rest.step;
    return found;
  }

  // Does the rest of apply() for the tile of place().
  template <class Finish> void run_pairs(const Finish& finish) {
    // If the last operation is the product of a register and one number per tile, or a multiply-add of such a product,
    // finish() runs it, which saves a pass over the strip.
    const int32_t first = variant_->pairs[0], end = variant_->pairs[1];
    const Instruction* const last = first < end ? program_->instructions + end - 1 : nullptr;
    const bool fused = last && last->out == variant_->value && space(last->out) == kPairs &&
                       (last->operation == k_multiply_add_f || last->operation == k_mul_f) &&
                       (space(last->operands[0]) == kScalars) != (space(last->operands[1]) == kScalars);
    const int64_t at_once = strip_ / columns_;
    for (int64_t row = 0; row < rows_; row += at_once) {
      const int64_t some = rows_ - row < at_once ? rows_ - row : at_once;
      for (int32_t i = first; i < end - fused; ++i) {
        const Instruction& own = program_->instructions[i];
        const Source<T> to = pair_source(own.out, row);
        run(own, {const_cast<T*>(to.data), to.step, some, columns_},
            [&](int32_t operand) { return pair_source(operand, row); });
      }
      if (!fused) {
        const Source<T> value = pair_source(variant_->value, row);
        value.vector ? finish_strip<true>(row, some, value, finish) : finish_strip<false>(row, some, value, finish);
        continue;
      }
      Source<T> a = pair_source(last->operands[0], row), b = pair_source(last->operands[1], row);
      if (space(last->operands[0]) == kScalars) std::swap(a, b);
      const T factor = *b.data;
      if (last->operation == k_mul_f) {
        a.vector ? finish_products<true, false>(row, some, a, factor, {zeros_, 0, false}, finish)
                 : finish_products<false, false>(row, some, a, factor, {zeros_, 0, false}, finish);
        continue;
      }
      const Source<T> c = pair_source(last->operands[2], row);
      if (a.vector) {
        c.vector ? finish_products<true, true>(row, some, a, factor, c, finish)
                 : finish_products<true, false>(row, some, a, factor, c, finish);
      } else {
        finish_products<false, true>(row, some, a, factor, c, finish);
      }
    }
  }

  static SPATTN_INLINE Vec<T> without_nan(Vec<T> x) { return x == x ? x : splat(kInfinity<T>); }

  // As apply() above, but stores the scores itself, +inf for NaN.
  template <bool kKeysInLanes>
  void apply(const int64_t* rows, int64_t count, const int64_t* lanes, int64_t columns, T* scores, int64_t ld,
             int64_t slot = 0) {
    apply<kKeysInLanes>(rows, count, lanes, columns, scores, ld, slot,
                        [&](int64_t column, int64_t row, int64_t some, auto score) __attribute__((always_inline)) {
                          for (int64_t at = row; at < row + some; ++at)
                            store(scores + at * ld + column, without_nan(score(at)));
                        });
  }

  // Returns the derivatives of the last tile's pairs.
  Source<T> derivative() const { return pair_source(variant_->derivative, 0); }

  // Adds the terms of the last tile to the gradients of tables. `gradients`, (count, columns), is dS with respect to
  // the results of f, 0 for masked pairs.
  void add_table_gradients(const T* gradients, int64_t ld) {
    for (int32_t i = variant_->uses[0]; i < variant_->uses[1]; ++i) add_use(program_->uses[i], gradients, ld);
  }

  // Replaces dS with respect to f by dS with respect to q.k, times `factor`; writes 0 where the weight is 0, as the
  // derivative may be NaN there.
  void multiply_derivatives(const T* weights, T factor, T* gradients, int64_t ld) const {
    const Source<T> derivative = this->derivative();
    const auto multiply = [&](auto vector) {
      for (int64_t row = 0; row < rows_; ++row) {
        const RowReader<Vec<T>, decltype(vector)::value, T> factors(derivative, row);
        for (int64_t at = row * ld, column = 0; column < columns_; column += L) {
          const Vec<T> product = load<Vec<T>>(gradients + at + column) * factors[column] * factor;
          store(gradients + at + column, load<Vec<T>>(weights + at + column) != T(0) ? product : Vec<T>{});
        }
      }
    };
    derivative.vector ? multiply(Count<1>{}) : multiply(Count<0>{});
  }

 private:
  template <bool kVector, class Finish>
  SPATTN_INLINE void finish_strip(int64_t row, int64_t some, const Source<T>& value, const Finish& finish) const {
    for (int64_t column = 0; column < columns_; column += L) {
      finish(column, row, some, [&](int64_t at) __attribute__((always_inline)) {
        return RowReader<Vec<T>, kVector, T>(value, at - row)[column];
      });
    }
  }

  // As finish_strip() with a * factor + c.
  template <bool kA, bool kC, class Finish>
  SPATTN_INLINE void finish_products(int64_t row, int64_t some, const Source<T>& a, T factor, const Source<T>& c,
                                     const Finish& finish) const {
    const Vec<T> factors = splat(factor);
    for (int64_t column = 0; column < columns_; column += L) {
      finish(column, row, some, [&](int64_t at) __attribute__((always_inline)) {
        const RowReader<Vec<T>, kA, T> left(a, at - row);
        const RowReader<Vec<T>, kC, T> right(c, at - row);
        return left[column] * factors + right[column];
      });
    }
  }

  static int space(int32_t reg) { return reg >> kSpaceShift; }
  static int64_t index(int32_t reg) { return reg & ((1 << kSpaceShift) - 1); }
  T* scalars(int64_t slot) const { return scalars_ + slot * program_->registers[kScalars] * L; }

  template <class Visit> void run_list(const int32_t (&range)[2], const Visit& visit) const {
    for (int32_t i = range[0]; i < range[1]; ++i) visit(program_->instructions[i]);
  }

  // Runs an instruction; source(register) returns its operands.
  template <class Of> void run(const Instruction& own, const Target<T>& block, const Of& source) {
    if (own.operation == k_look_up) {
      const ScoreTable& table = program_->tables[own.number];
      for (int axis = 0; axis < table.axes; ++axis) {
        sources_[axis] = source(program_->indices[own.operands[0] + axis]);
      }
      return look_up(table, block, sources_);
    }
    if (own.operation < k_look_up) return fill(own, block);
    const Source<T> in[3] = {source(own.operands[0]), source(own.operands[1]), source(own.operands[2])};
    execute(own.operation, block, in);
  }

  static void fill_whole(const Target<T>& block, int64_t start, int64_t step) {
    IntVec<T> found;
    for (int i = 0; i < L; ++i) found[i] = Whole<T>(start + i * step);
    const Whole<T> next = Whole<T>(L * step);
    for (int64_t i = 0; i < block.columns; i += L, found += next) store(block.out + i, found);
  }

  // Writes an input or a number.
  void fill(const Instruction& own, const Target<T>& block) const {
    const int64_t offset = call_.kv_len - call_.q_len;
    switch (own.operation) {
      case k_input_scale:
        return fill_real(block, T(call_.scale));
      case k_number_f:
        return fill_real(block, T(program_->numbers[own.number]));
      case k_number_i:
        return fill_whole(block, int64_t(program_->numbers[own.number]), 0);
      case k_number_b:
        return fill_whole(block, program_->numbers[own.number] != 0 ? -1 : 0, 0);
      case k_input_b:
        return fill_whole(block, batch_, 0);
      case k_input_h:
        return fill_whole(block, head_, 0);
      case k_input_offset:
        return fill_whole(block, offset, 0);
      case k_input_q:
        return fill_positions(own.out, kQueries, offset, block);
      case k_input_k:
        return fill_positions(own.out, kKeys, 0, block);
    }
  }
  static void fill_real(const Target<T>& block, T value) {
    for (int64_t i = 0; i < block.columns; ++i) block.out[i] = value;
  }

  void fill_positions(int32_t out, int side, int64_t offset, const Target<T>& block) const {
    if (space(out) == kScalars) return fill_whole(block, 0, 0);  // scalars do not depend on positions
    const bool along = in_lanes(side);
    if (space(out) == kDiagonals) {
      // Along a register of diagonals, the position of the columns advances; that of the rows is the first row's.
      const int64_t start = along ? lane_.start - (rows_ - 1) * step_ : row_.start;
      return fill_whole(block, start + offset, along ? step_ : 0);
    }
    const int64_t* position = along ? lane_position_ : row_position_;
    const int64_t count = along ? columns_ : rows_;
    for (int64_t i = 0; i < block.columns; ++i) {
      const Whole<T> value = Whole<T>((i < count ? position[i] : 0) + offset);
      memcpy(block.out + i, &value, sizeof value);
    }
  }

  bool in_lanes(int side) const { return (side == kKeys) == keys_in_lanes_; }

  // A register of a row, a column or the diagonals.
  T* line(int32_t reg) const {
    return space(reg) == kDiagonals ? diagonals_ + index(reg) * diagonal_
                                    : lines_[space(reg) == kKeys] + index(reg) * line_;
  }
  Source<T> line_source(int32_t reg) const {
    if (space(reg) == kScalars) return {scalars(slot_) + index(reg) * L, 0, false};
    return {line(reg), 0, true};
  }

  // A register as an operand of pairs, from row `row` of the tile on.
  Source<T> pair_source(int32_t reg, int64_t row) const {
    switch (space(reg)) {
      case kScalars:
        return {scalars(slot_) + index(reg) * L, 0, false};
      case kQueries:
      case kKeys:
        return in_lanes(space(reg)) ? Source<T>{line(reg), 0, true} : Source<T>{line(reg) + row, 1, false};
      case kDiagonals:
        return {line(reg) + rows_ - 1 - row, -1, true};
      case kPairs:
        return {strips_ + index(reg) * strip_, columns_, true};
      case kTiles:
        return {tiles_ + index(reg) * tile_size_ + row * tile_ld_, tile_ld_, true};
      default:
        return {products_ + row * products_ld_, products_ld_, true};
    }
  }

  // Calls visit(row, term) for each row; term(column) returns dS times the derivative of a use.
  template <class Visit> void each_row(const Use& use, const T* gradients, int64_t ld, const Visit& visit) const {
    const Source<T> derivative = pair_source(use.derivative, 0);
    const auto all = [&](auto vector) {
      for (int64_t row = 0; row < rows_; ++row) {
        const RowReader<Vec<T>, decltype(vector)::value, T> factors(derivative, row);
        visit(row, [&](int64_t column) __attribute__((always_inline)) {
          const Vec<T> gradient = load<Vec<T>>(gradients + row * ld + column);
          return gradient != T(0) ? gradient * factors[column] : Vec<T>{};
        });
      }
    };
    derivative.vector ? all(Count<1>{}) : all(Count<0>{});
  }

  // Writes the sums over rows of dS times a derivative to terms_, in several chains of additions.
  template <bool kVector> void sum_columns(const Source<T>& derivative, const T* gradients, int64_t ld) {
    constexpr int kChains = 4;
    for (int64_t column = 0; column < columns_; column += L) {
      Vec<T> sum[kChains] = {};
      const auto add = [&](int64_t row, Vec<T>& to) __attribute__((always_inline)) {
        const Vec<T> gradient = load<Vec<T>>(gradients + row * ld + column);
        const Vec<T> term = gradient * RowReader<Vec<T>, kVector, T>(derivative, row)[column];
        to += gradient != T(0) ? term : Vec<T>{};
      };
      int64_t row = 0;
      for (; row + kChains <= rows_; row += kChains) {
        SPATTN_UNROLL
        for (int i = 0; i < kChains; ++i) add(row + i, sum[i]);
      }
      for (; row < rows_; ++row) add(row, sum[0]);
      store(terms_ + column, (sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
  }

  static double across(Vec<T> terms) {
    double sum = 0;
    for (int i = 0; i < L; ++i) sum += double(terms[i]);
    return sum;
  }

  // Adds the terms of a use to the accumulators. First sums, in a fixed order, the terms that share an element because
  // they are in one row, one column, one diagonal or the same tile.
  void add_use(const Use& use, const T* gradients, int64_t ld) {
    const ScoreTable& table = program_->tables[use.table];
    if (!table.sums && !table.direct) return;
    const int32_t* registers = program_->indices + use.indices;
    // Adds a term for the element at a column of a row.
    const auto add = [&](int64_t row, int64_t column, double term) {
      if (term == 0) return;
      add_term<T>(table, program_->shared, term, [&](int axis) {
        const Source<T> source =
            use.space == kDiagonals ? line_source(registers[axis]) : pair_source(registers[axis], row);
        Whole<T> found;
        memcpy(&found, source.data + (source.vector ? column : 0), sizeof found);
        return int64_t(found);
      });
    };
    const bool one_side = use.space == kQueries || use.space == kKeys;
    if (use.space == kPairs) {
      each_row(use, gradients, ld, [&](int64_t row, auto term) {
        for (int64_t column = 0; column < columns_; column += L) {
          const Vec<T> terms = term(column);
          for (int i = 0; i < L; ++i) add(row, column + i, double(terms[i]));
        }
      });
    } else if (one_side && !in_lanes(use.space)) {
      each_row(use, gradients, ld, [&](int64_t row, auto term) {
        Vec<T> sum = {};
        for (int64_t column = 0; column < columns_; column += L) sum += term(column);
        add(row, 0, across(sum));
      });
    } else if (use.space == kDiagonals) {
      // Several chains, because a load would wait for the previous row's store, which overlaps it unaligned.
      for (int64_t i = 0; i < kDiagonalChains * diagonal_; i += L) store(terms_ + i, Vec<T>{});
      each_row(use, gradients, ld, [&](int64_t row, auto term) {
        T* const to = terms_ + row % kDiagonalChains * diagonal_ + rows_ - 1 - row;
        for (int64_t column = 0; column < columns_; column += L) {
          store(to + column, load<Vec<T>>(to + column) + term(column));
        }
      });
      for (int64_t i = 0; i < rows_ + columns_ - 1; ++i) {
        double sum = 0;
        for (int64_t chain = 0; chain < kDiagonalChains; ++chain) sum += double(terms_[chain * diagonal_ + i]);
        add(0, i, sum);
      }
    } else {
      const Source<T> derivative = pair_source(use.derivative, 0);
      derivative.vector ? sum_columns<true>(derivative, gradients, ld) : sum_columns<false>(derivative, gradients, ld);
      if (one_side) {
        for (int64_t i = 0; i < columns_; ++i) add(0, i, double(terms_[i]));
        return;
      }
      double sum = 0;
      for (int64_t i = 0; i < columns_; ++i) sum += double(terms_[i]);
      add(0, 0, sum);
    }
  }

  static constexpr int64_t kDiagonalChains = 4;
  static constexpr T zeros_[1] = {};

  const Call& call_;
  const ScoreProgram* program_;
  int64_t tile_ld_, tile_size_, line_, diagonal_, strip_;
  T *scalars_ = nullptr, *lines_[2] = {}, *diagonals_ = nullptr, *strips_ = nullptr, *tiles_ = nullptr;
  Source<T>* sources_ = nullptr;
  T* terms_ = nullptr;  // (kDiagonalChains, diagonal_)

  int64_t batch_ = 0, head_ = 0, slot_ = 0;
  bool keys_in_lanes_ = false;
  int64_t rows_ = 0, columns_ = 0, step_ = 0, products_ld_ = 0;
  const int64_t *row_position_ = nullptr, *lane_position_ = nullptr;
  const T* products_ = nullptr;
  Spacing row_, lane_;
  const Variant* variant_ = nullptr;
};

// The score function of one pair at a time, in float64.
class PairScore {
  using V = Vec<double>;

 public:
  // `registers` has single_registers() values.
  PairScore(const Call& call, int64_t batch, int64_t head, double* registers)
      : call_(call), program_(call.score), batch_(batch), head_(head), registers_(registers) {}

  static int64_t single_registers(const Call& call) {
    return call.score ? call.score->registers[kSingle] * kLanes<double> : 0;
  }

  explicit operator bool() const { return program_ != nullptr; }

  // Returns the score of a pair, and writes its derivative unless null.
  double of_pair(double product, int64_t query, int64_t key, double* derivative) const {
    const Variant& variant = program_->variants[2];
    for (int32_t i = variant.pairs[0]; i < variant.pairs[1]; ++i) {
      run(program_->instructions[i], product, query + call_.kv_len - call_.q_len, key);
    }
    if (derivative) *derivative = *at(variant.derivative);
    return *at(variant.value);
  }

  // Adds dS with respect to the last pair's score to the gradients of tables; `T` is the compute type of the kernel.
  template <class T> void add_table_gradients(double gradient) const {
    const Variant& variant = program_->variants[2];
    for (int32_t i = variant.uses[0]; i < variant.uses[1] && gradient != 0; ++i) {
      const Use& use = program_->uses[i];
      const ScoreTable& table = program_->tables[use.table];
      if (!table.sums && !table.direct) continue;
      add_term<T>(table, program_->shared, gradient * *at(use.derivative), [&](int axis) {
        int64_t found;
        memcpy(&found, at(program_->indices[use.indices + axis]), sizeof found);
        return found;
      });
    }
  }

 private:
  double* at(int32_t reg) const { return registers_ + (reg & ((1 << kSpaceShift) - 1)) * kLanes<double>; }

  void run(const Instruction& own, double product, int64_t query, int64_t key) const {
    double* const to = at(own.out);
    const auto real = [&](double x) { store(to, splat(x)); };
    const auto whole = [&](int64_t x) { store(to, IntVec<double>{} + x); };
    const Target<double> block = {to, 0, 1, kLanes<double>};
    switch (own.operation) {
      case k_input_product:
        return real(product);
      case k_input_scale:
        return real(call_.scale);
      case k_input_b:
        return whole(batch_);
      case k_input_h:
        return whole(head_);
      case k_input_q:
        return whole(query);
      case k_input_k:
        return whole(key);
      case k_input_offset:
        return whole(call_.kv_len - call_.q_len);
      case k_number_f:
        return real(program_->numbers[own.number]);
      case k_number_i:
        return whole(int64_t(program_->numbers[own.number]));
      case k_number_b:
        return whole(program_->numbers[own.number] != 0 ? -1 : 0);
      case k_look_up: {
        const ScoreTable& table = program_->tables[own.number];
        Source<double> in[kMostAxes];
        for (int axis = 0; axis < table.axes; ++axis) {
          in[axis] = {at(program_->indices[own.operands[0] + axis]), 0, true};
        }
        return look_up(table, block, in);
      }
    }
    const Source<double> in[3] = {
        {at(own.operands[0]), 0, true}, {at(own.operands[1]), 0, true}, {at(own.operands[2]), 0, true}};
    execute(own.operation, block, in);
  }

  const Call& call_;
  const ScoreProgram* program_;
  int64_t batch_, head_;
  double* registers_;
};

}  // namespace SPATTN_ISA
}  // namespace spattn
