/* Parses one HTTP/1.1 answer as it arrives: head, chunks, and the lines of an event stream.
 *
 * An event is a line that starts with "data:", except a line with the end marker. */
#include <ctype.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

enum { HEAD_SIZE = 16384 };
enum ChunkState { SIZE, EXTENSION, DATA, DATA_END, LAST };

typedef struct {
    const char *end_mark; /* part of a data line, or a line's start if it begins with "event:"; "" for none */
    int status;
    long events;
    uint64_t first_at; /* when the first event arrived, or 0 */
    bool done;         /* whether the end marker has arrived */
    bool head_seen, chunked, close_after;
    int head_len;
    long left; /* bytes missing of a body with a length; -1 without a length */
    enum ChunkState chunk_state;
    long chunk_left;
    int line_len;
    char line[64];        /* the start of the current line */
    char head[HEAD_SIZE]; /* the last field, so that expect_answer() need not clear it */
} Answer;

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void expect_answer(Answer *a, const char *end_mark) {
    memset(a, 0, offsetof(Answer, head));
    a->end_mark = end_mark;
    a->left = -1;
}

static void end_of_line(Answer *a) {
    a->line[a->line_len] = 0;
    bool named = !strncmp(a->end_mark, "event:", 6);
    if (!strncmp(a->line, "data:", 5)) {
        if (!a->first_at)
            a->first_at = now();
        if (a->end_mark[0] && !named && strstr(a->line, a->end_mark))
            a->done = true;
        else
            a->events++;
    } else if (named && !strncmp(a->line, a->end_mark, strlen(a->end_mark))) {
        a->done = true;
    }
    a->line_len = 0;
}

static void read_body(Answer *a, const char *p, long n) {
    for (const char *end = p + n; p < end;) {
        const char *newline = memchr(p, '\n', end - p);
        int length = (newline ? newline : end) - p, room = (int)sizeof a->line - 1 - a->line_len;
        int kept = length < room ? length : room;
        memcpy(a->line + a->line_len, p, kept);
        a->line_len += kept;
        if (!newline)
            return;
        end_of_line(a);
        p = newline + 1;
    }
}

/* Returns the offset of the body within the n bytes; n if the head is incomplete; -1 if it is too long. */
static int read_head(Answer *a, const char *b, int n) {
    int before = a->head_len, room = HEAD_SIZE - 1 - before, kept = n < room ? n : room;
    memcpy(a->head + before, b, kept);
    a->head_len += kept;
    a->head[a->head_len] = 0;
    char *blank = strstr(a->head, "\r\n\r\n");
    if (!blank)
        return a->head_len == HEAD_SIZE - 1 ? -1 : n;
    a->head_seen = true;
    a->status = atoi(a->head + 9);
    for (char *p = strstr(a->head, "\r\n"); p < blank; p = strstr(p, "\r\n")) {
        p += 2;
        if (!strncasecmp(p, "content-length:", 15))
            a->left = atol(p + 15);
        else if (!strncasecmp(p, "transfer-encoding:", 18))
            a->chunked = true;
        else if (!strncasecmp(p, "connection:", 11))
            a->close_after = !strncasecmp(p + 11 + strspn(p + 11, " "), "close", 5);
    }
    return blank + 4 - a->head - before;
}

static bool read_chunks(Answer *a, const char *b, int n) {
    for (int i = 0; i < n;) {
        if (a->chunk_state == DATA) {
            long k = n - i < a->chunk_left ? n - i : a->chunk_left;
            read_body(a, b + i, k);
            i += k;
            a->chunk_left -= k;
            if (!a->chunk_left)
                a->chunk_state = DATA_END;
            continue;
        }
        char ch = b[i++];
        if (ch == '\n') {
            if (a->chunk_state == LAST)
                return true;
            a->chunk_state = a->chunk_state == DATA_END ? SIZE : a->chunk_left ? DATA : LAST;
        } else if (a->chunk_state == SIZE && isxdigit(ch)) {
            a->chunk_left = a->chunk_left * 16 + (isdigit(ch) ? ch - '0' : (ch | 32) - 'a' + 10);
        } else if (ch == ';') {
            a->chunk_state = EXTENSION;
        }
    }
    return false;
}

/* Returns 1 if the answer is complete, 0 if more bytes must follow, -1 if it is invalid. */
static int read_answer(Answer *a, const char *b, int n) {
    int at = 0;
    if (!a->head_seen) {
        at = read_head(a, b, n);
        if (!a->head_seen)
            return at < 0 ? -1 : 0;
    }
    if (a->chunked)
        return read_chunks(a, b + at, n - at);
    read_body(a, b + at, n - at);
    if (a->left < 0)
        return 0;
    a->left -= n - at;
    return a->left <= 0;
}
