// Weights of 8 bits: whole numbers, times a scale for every kInt8Group of k of an output.
//
// A panel is 64 outputs. For each group of k it holds 64 scales in bf16, then [k][64 outputs] whole numbers; for products
// in whole numbers [k / 4][64 outputs][4 k], each plus 128.
#pragma once

constexpr long kInt8Group = 64;
constexpr long kInt8Bytes = 64 * 2 + kInt8Group * 64;  // of a group
