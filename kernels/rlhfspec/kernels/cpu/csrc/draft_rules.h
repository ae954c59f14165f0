// What a draft decides by: how likely a node is accepted, and whether one more level pays. The same numbers, in the same
// order of operations, as in rlhfspec/engine/drafting/acceptance.py and levels.py.
#pragma once

#include <math.h>
#include <stdint.h>

namespace {

constexpr int kDepths = 3, kRanks = 4, kFine = 256;  // shape of the table of log-odds
constexpr float kFinePerUnit = 8.0f;
constexpr double kMostLogOdds = 9.0;
constexpr float kLargestGap = 30.0f, kNoCandidate = -1e30f;

// log_odds [kDepths, kRanks, kFine] by depth, rank and gap; `shift` is the sequence's own.
inline float chance_of(const double* log_odds, double shift, int32_t depth, int32_t rank, float gap) {
    long group = ((depth < kDepths ? depth : kDepths) - 1) * kRanks + (rank < kRanks ? rank : kRanks - 1);
    float place = gap * kFinePerUnit;
    place = place < (float)(kFine - 1) ? place : (float)(kFine - 1);  // a NaN becomes an ordinary gap
    place = place > 0.0f ? place : 0.0f;
    double odds = log_odds[group * kFine + (long)place] + shift;
    odds = odds > -kMostLogOdds ? odds : -kMostLogOdds;
    odds = odds < kMostLogOdds ? odds : kMostLogOdds;
    return (float)(1.0 / (1.0 + ::exp(-odds)));
}

// Of the candidate `rank` of a row's k: how far it is behind the best; of the best, how far the second is behind it.
inline float gap_of(const int32_t* tokens, const float* scores, long rank) {
    long other = rank == 0 ? 1 : rank;
    float best = tokens[0] >= 0 ? scores[0] : kNoCandidate;
    float behind = best - (tokens[other] >= 0 ? scores[other] : kNoCandidate);
    return behind >= kLargestGap ? kLargestGap : behind;  // a NaN stays
}

// Seconds by rows, linear between knots: CostTable.seconds.
struct CostTable {
    const double *rows, *knots;
    int64_t count;
    double factor;

    double seconds(double wanted) const {
        int64_t above = 0;
        while (above < count - 1 && rows[above] <= wanted) ++above;
        if (above == 0) return factor * knots[0];
        double left = rows[above - 1], low = knots[above - 1];
        return factor * (low + (knots[above] - low) * (wanted - left) / (rows[above] - left));
    }
};

// PayingLevel.go_on.
struct PayingLevel {
    CostTable target, level;
    double tokens_per_second, success;
    int64_t verified_rows;  // if the draft ended now

    // `ahead` levels of this frontier together.
    bool pays(const float* path_acceptance, const int32_t* frontier, long rows, long ahead) const {
        double seconds = target.seconds(verified_rows + ahead * rows) - target.seconds(verified_rows);
        double price = tokens_per_second * seconds / (ahead * rows), worth = 0.0, factor = 1.0;
        for (long level = 0; level < ahead; ++level) {
            factor *= success;
            for (long i = 0; i < rows; ++i) {
                double gain = path_acceptance[frontier[i]] * factor - price;
                worth += gain > 0.0 ? gain : 0.0;
            }
        }
        return worth > ahead * (tokens_per_second * level.seconds(rows));
    }

    bool go_on(const float* path_acceptance, const int32_t* frontier, long rows) {
        for (long ahead = 1; ahead <= 4; ahead *= 2)
            if (pays(path_acceptance, frontier, rows, ahead)) {
                verified_rows += rows;
                return true;
            }
        return false;
    }
};

}  // namespace
