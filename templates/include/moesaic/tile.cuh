// Tiles of products: values[p][row][column] += sum over k of left(row, k) * right_p(column, k), in the registers of a block.
//
//   using Shape = moesaic::TileShape<64, 128, 16, 2, 1, false, true, 16, 16, 256>;
//   using Tile = moesaic::SimtTile<T, Shape>;
//   Tile tile;
//   tile.clear();
//   tile.multiply(left, right, depth, left_extent, right_extent, shared);   // shared: Tile::kSharedBytes, aligned to 16
//   for (int i = 0; i < Tile::kOwnRows; ++i)            // row(i) of the tile
//     for (int j = 0; j < Tile::kOwnVectors; ++j)       // columns column(j) + 0 .. kVector - 1 of each part
//       ... tile.values[p][i][j][v] ...
//
// `left(r)` and `right(part, r)` return the address of an operand's line (tile_common.cuh): of its element k = 0 along the
// sum, of that of the tile's first row or column across it. Null stands for a line of zeros, and nothing is read. They are
// called for r < extent (along; once a line and thread) or r < depth (across), and nothing is read past `depth` elements
// of a line along, past the extent across: both operands are zero there, so that no neighbour's infinity becomes NaN.
//
// All threads of the block call multiply and sum_rows, with the same numbers. Both begin with a barrier and end without:
// they may follow each other at will, but whoever else writes to `shared` afterwards needs a barrier before.
#pragma once

#include "moesaic/tile_mma.cuh"
#include "moesaic/tile_simt.cuh"
#include "moesaic/tile_wgmma.cuh"
