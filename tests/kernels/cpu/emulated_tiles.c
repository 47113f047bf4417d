/* The AMX instructions that the kernels use, in plain C, for CPUs without AMX (Intel, "Architecture Instruction Set
   Extensions Programming Reference"). Each thread has its own tiles. */

#include <stdint.h>
#include <string.h>

#define EACH(m, n, k, rows, columns, depth) \
    for (int m = 0; m < (rows); m++) for (int k = 0; k < (depth); k++) for (int n = 0; n < (columns); n++)

static __thread uint8_t tiles[8][16][64];
static __thread uint16_t widths[8];
static __thread uint8_t heights[8];

void emulated_ldtilecfg(const uint8_t *config) {
    memcpy(widths, config + 16, sizeof widths);
    memcpy(heights, config + 48, sizeof heights);
    memset(tiles, 0, sizeof tiles);
}

void emulated_tilerelease(void) {
    memset(heights, 0, sizeof heights);
    memset(tiles, 0x55, sizeof tiles);
}

void emulated_tilezero(uint8_t tile) { memset(tiles[tile], 0, sizeof tiles[tile]); }

void emulated_tileloadd64(uint8_t tile, const uint8_t *place, int64_t step) {
    emulated_tilezero(tile);
    for (int row = 0; row < heights[tile]; row++) memcpy(tiles[tile][row], place + row * step, widths[tile]);
}

void emulated_tilestored64(uint8_t tile, uint8_t *place, int64_t step) {
    for (int row = 0; row < heights[tile]; row++) memcpy(place + row * step, tiles[tile][row], widths[tile]);
}

void emulated_tdpbssd(uint8_t sum, uint8_t a, uint8_t b) {
    EACH(m, n, k, heights[sum], widths[sum] / 4, widths[a] / 4)
        for (int i = 0; i < 4; i++)
            ((int32_t *)tiles[sum][m])[n] += (int8_t)tiles[a][m][4 * k + i] * (int8_t)tiles[b][k][4 * n + i];
}

void emulated_tdpbusd(uint8_t sum, uint8_t a, uint8_t b) {
    EACH(m, n, k, heights[sum], widths[sum] / 4, widths[a] / 4)
        for (int i = 0; i < 4; i++)
            ((int32_t *)tiles[sum][m])[n] += tiles[a][m][4 * k + i] * (int8_t)tiles[b][k][4 * n + i];
}

static float widened(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

void emulated_tdpbf16ps(uint8_t sum, uint8_t a, uint8_t b) {
    for (int m = 0; m < heights[sum]; m++) {
        float totals[16][2] = {0};
        for (int k = 0; k < widths[a] / 4; k++)
            for (int n = 0; n < widths[sum] / 4; n++)
                for (int i = 0; i < 2; i++)
                    totals[n][i] += widened(((uint16_t *)tiles[a][m])[2 * k + i]) *
                                    widened(((uint16_t *)tiles[b][k])[2 * n + i]);
        for (int n = 0; n < widths[sum] / 4; n++) ((float *)tiles[sum][m])[n] += totals[n][0] + totals[n][1];
    }
}
