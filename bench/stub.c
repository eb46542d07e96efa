/* Simulates the model provider: OpenAI chat completions over HTTP/1.1, one thread, epoll.
 *
 *   stub PORT [tokens=128] [delay_us=0] [ttft_us=0]
 *
 * POST (any path)  a completion, streamed if the body has "stream": true; its length is "max_tokens" if that
 *                  is below 4096, else the default
 * GET  /ctl?tokens=N&delay_us=N&ttft_us=N&real=0|1
 *                  changes the defaults of later requests, and returns them with the number of completed
 *                  requests and of streams that the caller cut
 * GET  (any other) the list of models
 *
 * A stream is a role chunk, one chunk per token, finish, usage and [DONE]. Every event has its own HTTP chunk
 * and its own write(2), round-robin over the connections, so that a relay sees separate reads unless it falls
 * behind. With real=1 the chunks carry prose (escapes, several scripts) and the fields that a deployed vLLM
 * sends. The default is a short fixed chunk, with which all recorded figures were measured.
 *
 * Streams without delay are in the run queue; paced streams are in a heap ordered by their next due time.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_FD = 20000, IN_SIZE = 65536, BACKLOG = 8192, EVENTS = 1024 };

typedef struct {
    int fd;
    bool open, streaming;
    bool queued; /* in the run queue, possibly because of a closed connection with the same fd */
    int heap_at; /* position in the heap, or -1 */
    int step, tokens;
    bool real;
    uint64_t due;
    char *in;
    int in_len;
    char *pending; /* bytes that the kernel has not accepted yet */
    int pending_len, pending_off;
} Conn;

static Conn conns[MAX_FD];
static Conn *run_queue[MAX_FD], *batch[MAX_FD], *heap[MAX_FD];
static int run_len, heap_len, poller;

static int default_tokens = 128;
static uint64_t delay_ns, ttft_ns, served, cut;
static bool real;

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void heap_place(int at, Conn *c) {
    heap[at] = c;
    c->heap_at = at;
}

static void heap_up(int at, Conn *c) {
    for (int parent; at > 0 && heap[parent = (at - 1) / 2]->due > c->due; at = parent)
        heap_place(at, heap[parent]);
    heap_place(at, c);
}

static void heap_down(int at, Conn *c) {
    for (int child; (child = 2 * at + 1) < heap_len; at = child) {
        if (child + 1 < heap_len && heap[child + 1]->due < heap[child]->due)
            child++;
        if (heap[child]->due >= c->due)
            break;
        heap_place(at, heap[child]);
    }
    heap_place(at, c);
}

static void heap_push(Conn *c) { heap_up(heap_len++, c); }

static void heap_remove(Conn *c) {
    int at = c->heap_at;
    Conn *last = heap[--heap_len];
    c->heap_at = -1;
    if (last == c)
        return;
    if (at > 0 && heap[(at - 1) / 2]->due > last->due)
        heap_up(at, last);
    else
        heap_down(at, last);
}

static void enqueue(Conn *c) {
    if (!c->queued)
        run_queue[run_len++] = c;
    c->queued = true;
}

static void watch(Conn *c, int op, uint32_t events) {
    struct epoll_event e = {.events = events, .data.ptr = c};
    epoll_ctl(poller, op, c->fd, &e);
}

static void drop_pending(Conn *c) {
    free(c->pending);
    c->pending = NULL;
    c->pending_len = c->pending_off = 0;
}

static void close_conn(Conn *c) {
    if (!c->open)
        return;
    close(c->fd);
    cut += c->streaming;
    c->open = c->streaming = false;
    drop_pending(c);
    /* A stale entry would make the next stream on this fd twice as fast. */
    if (c->heap_at >= 0)
        heap_remove(c);
}

static void out(Conn *c, const char *bytes, int n) {
    if (c->pending) {
        c->pending = realloc(c->pending, c->pending_len + n);
        memcpy(c->pending + c->pending_len, bytes, n);
        c->pending_len += n;
        return;
    }
    int written = send(c->fd, bytes, n, MSG_NOSIGNAL);
    if (written == n)
        return;
    if (written < 0) {
        if (errno != EAGAIN) {
            close_conn(c);
            return;
        }
        written = 0;
    }
    c->pending_len = n - written;
    c->pending = malloc(c->pending_len);
    memcpy(c->pending, bytes + written, c->pending_len);
    watch(c, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
}

static void flush_pending(Conn *c) {
    while (c->open && c->pending) {
        int written = send(c->fd, c->pending + c->pending_off, c->pending_len - c->pending_off, MSG_NOSIGNAL);
        if (written < 0) {
            if (errno != EAGAIN)
                close_conn(c);
            return;
        }
        c->pending_off += written;
        if (c->pending_off == c->pending_len) {
            drop_pending(c);
            watch(c, EPOLL_CTL_MOD, EPOLLIN);
        }
    }
}

/* ---- events of a stream ---- */

static const char *const WORDS[] = {
    "A",       " bridge", " carries", " a",   " road",    " over", " what",  " would", " stop",  " it",
    ":",       " water",  ",",        " a",   " valley",  ",",     " rails", ".",      "\\n\\n", "\\\"",
    "Pont",    " cou",    "pé",       "\\\"", " –",       " 橋",   " 🌉",     " 1",     "3",      "5",
    "\\u00a0", "m",       " long",    "\\t",  " (approx", ".)",    " `x",    " \\\\",  " y`",    "\\n"};
enum { WORD_COUNT = sizeof WORDS / sizeof *WORDS };

#define PLAIN_HEAD                                                                                           \
    "data: {\"id\":\"chatcmpl-stub0000000000\",\"object\":\"chat.completion.chunk\","                        \
    "\"created\":1750000000,\"model\":\"stub\",\"choices\":["
#define REAL_HEAD                                                                                            \
    "data: {\"id\":\"chatcmpl-8f14e45fceea167a5a36dedd4bea2543\",\"object\":\"chat.completion.chunk\","      \
    "\"created\":1750000000,\"model\":\"gpt-oss-120b\",\"choices\":["
#define PLAIN_TAIL "}]}\n\n"
#define REAL_TAIL ",\"stop_reason\":null,\"token_ids\":null}],\"usage\":null}\n\n"

static void out_event(Conn *c, const char *event, int n, bool last) {
    char b[1024];
    int k = snprintf(b, sizeof b, "%x\r\n%.*s\r\n%s", (unsigned)n, n, event, last ? "0\r\n\r\n" : "");
    out(c, b, k);
}

static void step(Conn *c) {
    const char *head = c->real ? REAL_HEAD : PLAIN_HEAD, *tail = c->real ? REAL_TAIL : PLAIN_TAIL;
    char b[900], word[8];
    int n, s = c->step++;
    if (s == 0) {
        n = snprintf(b, sizeof b,
                     "%s{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
                     "\"finish_reason\":null%s",
                     head, tail);
    } else if (s <= c->tokens) {
        snprintf(word, sizeof word, "t%03d", s % 1000);
        n = snprintf(
            b, sizeof b,
            "%s{\"index\":0,\"delta\":{\"content\":\"%s\"},\"logprobs\":null,\"finish_reason\":null%s", head,
            c->real ? WORDS[s % WORD_COUNT] : word, tail);
    } else if (s == c->tokens + 1) {
        n = snprintf(b, sizeof b,
                     "%s{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"stop\"%s", head,
                     tail);
    } else if (s == c->tokens + 2) {
        n = snprintf(b, sizeof b,
                     "%s],\"usage\":{\"prompt_tokens\":12,\"completion_tokens\":%d,\"total_tokens\":%d}}\n\n",
                     head, c->tokens, c->tokens + 12);
    } else {
        c->streaming = false;
        served++;
        out_event(c, "data: [DONE]\n\n", 14, true);
        return;
    }
    out_event(c, b, n, false);
}

static void begin_stream(Conn *c) {
    static const char head[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                               "cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n";
    c->streaming = true;
    c->step = 0;
    c->real = real;
    out(c, head, sizeof head - 1);
    if (!c->open)
        return;
    if (!ttft_ns && !delay_ns) {
        enqueue(c);
        return;
    }
    c->due = now() + ttft_ns;
    if (!ttft_ns) {
        step(c);
        if (c->open)
            step(c);
        c->due += delay_ns;
    }
    if (c->open)
        heap_push(c);
}

/* ---- requests ---- */

static void out_json(Conn *c, const char *json) {
    char b[8800];
    int n = snprintf(b, sizeof b,
                     "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s",
                     strlen(json), json);
    out(c, b, n);
}

static long number_after(const char *text, const char *key, long otherwise) {
    const char *at = strstr(text, key);
    if (!at)
        return otherwise;
    at += strlen(key);
    return atol(at + strspn(at, " :"));
}

static void control(Conn *c) {
    char json[200];
    default_tokens = number_after(c->in, "tokens=", default_tokens);
    delay_ns = 1000u * number_after(c->in, "delay_us=", delay_ns / 1000);
    ttft_ns = 1000u * number_after(c->in, "ttft_us=", ttft_ns / 1000);
    real = number_after(c->in, "real=", real);
    snprintf(json, sizeof json,
             "{\"tokens\":%d,\"delay_us\":%llu,\"ttft_us\":%llu,\"real\":%d,\"served\":%llu,\"cut\":%llu}",
             default_tokens, (unsigned long long)delay_ns / 1000, (unsigned long long)ttft_ns / 1000, real,
             (unsigned long long)served, (unsigned long long)cut);
    out_json(c, json);
}

static void whole_answer(Conn *c) {
    char json[8192];
    int n =
        snprintf(json, sizeof json,
                 "{\"id\":\"chatcmpl-stub0000000000\",\"object\":\"chat.completion\",\"created\":1750000000,"
                 "\"model\":\"stub\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\","
                 "\"content\":\"");
    for (int i = 0; i < c->tokens && n < 7000; i++)
        n += sprintf(json + n, "t%03d", i % 1000);
    snprintf(json + n, sizeof json - n,
             "\"},\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":12,"
             "\"completion_tokens\":%d,\"total_tokens\":%d}}",
             c->tokens, c->tokens + 12);
    served++;
    out_json(c, json);
}

static void answer(Conn *c, const char *body) {
    if (!strncmp(c->in, "GET /ctl", 8)) {
        control(c);
        return;
    }
    if (!strncmp(c->in, "GET ", 4)) {
        out_json(c, "{\"object\":\"list\",\"data\":[{\"id\":\"stub\",\"object\":\"model\","
                    "\"created\":1750000000,\"owned_by\":\"stub\"}]}");
        return;
    }
    long wanted = number_after(body, "\"max_tokens\"", 0);
    c->tokens = wanted > 0 && wanted < 4096 ? wanted : default_tokens;
    const char *flag = strstr(body, "\"stream\"");
    if (flag && !strncmp(flag + 8 + strspn(flag + 8, " :"), "true", 4))
        begin_stream(c);
    else
        whole_answer(c);
}

/* Returns the length of the first request in the input, or 0 while part of it is missing. */
static int request_length(Conn *c, int *head_len) {
    char *end = strstr(c->in, "\r\n\r\n");
    if (!end)
        return 0;
    *head_len = end + 4 - c->in;
    int body_len = 0;
    bool chunked = false;
    for (char *line = c->in; line < end; line = strstr(line, "\r\n") + 2) {
        if (!strncasecmp(line, "content-length:", 15))
            body_len = atoi(line + 15);
        else if (!strncasecmp(line, "transfer-encoding: chunked", 26))
            chunked = true;
    }
    if (chunked) {
        char *last = strstr(c->in + *head_len, "0\r\n\r\n");
        return last ? last + 5 - c->in : 0;
    }
    return c->in_len < *head_len + body_len ? 0 : *head_len + body_len;
}

static void process(Conn *c) {
    while (c->open && !c->streaming && c->in_len > 0) {
        c->in[c->in_len] = 0;
        int head_len, total = request_length(c, &head_len);
        if (!total)
            return;
        char next = c->in[total];
        c->in[total] = 0;
        answer(c, c->in + head_len);
        if (!c->open)
            return;
        c->in[total] = next;
        c->in_len -= total;
        memmove(c->in, c->in + total, c->in_len);
    }
}

/* ---- the loop ---- */

static void accept_all(int listener) {
    for (;;) {
        int one = 1, fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
        if (fd < 0)
            return;
        if (fd >= MAX_FD) {
            close(fd);
            continue;
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        Conn *c = &conns[fd];
        c->fd = fd;
        c->open = true;
        c->streaming = false;
        c->in_len = 0;
        c->heap_at = -1;
        if (!c->in)
            c->in = malloc(IN_SIZE + 1);
        watch(c, EPOLL_CTL_ADD, EPOLLIN);
    }
}

static void receive(Conn *c) {
    int n = recv(c->fd, c->in + c->in_len, IN_SIZE - c->in_len, 0);
    if (n < 0 && errno == EAGAIN)
        return;
    if (n <= 0) { /* closed by the client, or a request larger than the buffer */
        close_conn(c);
        return;
    }
    c->in_len += n;
    process(c);
}

static void run_unpaced(void) {
    int n = run_len, behind = 0;
    memcpy(batch, run_queue, n * sizeof *batch);
    run_len = 0;
    for (int i = 0; i < n; i++) {
        Conn *c = batch[i];
        c->queued = false;
        if (!c->streaming || c->heap_at >= 0)
            continue;
        if (c->pending) {
            behind++;
            enqueue(c);
            continue;
        }
        step(c);
        if (c->streaming)
            enqueue(c);
        else
            process(c);
    }
    if (n && behind == n)
        usleep(50); /* all readers are behind: leave them the core */
}

static void run_paced(void) {
    uint64_t t = heap_len ? now() : 0;
    while (heap_len && heap[0]->due <= t) {
        Conn *c = heap[0];
        heap_remove(c);
        step(c);
        if (!c->streaming) {
            process(c);
            continue;
        }
        /* The first token follows the role at once. So do finish, usage and [DONE] after the last token. */
        bool at_once = c->step == 1 || c->step > c->tokens + 1;
        c->due = at_once ? t : c->due + (delay_ns ? delay_ns : 1);
        heap_push(c);
    }
}

static int wait_ms(void) {
    if (run_len)
        return 0;
    if (!heap_len)
        return -1;
    uint64_t t = now(), due = heap[0]->due;
    return due <= t ? 0 : (int)((due - t + 999999) / 1000000);
}

static int listen_on(int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(fd, (struct sockaddr *)&a, sizeof a) || listen(fd, BACKLOG)) {
        perror("stub: listen");
        exit(1);
    }
    return fd;
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);

    int port = argc > 1 ? atoi(argv[1]) : 9001;
    if (argc > 2)
        default_tokens = atoi(argv[2]);
    if (argc > 3)
        delay_ns = 1000u * atol(argv[3]);
    if (argc > 4)
        ttft_ns = 1000u * atol(argv[4]);

    static struct epoll_event events[EVENTS];
    int listener = listen_on(port);
    poller = epoll_create1(0);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = NULL};
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &e);
    for (;;) {
        int n = epoll_wait(poller, events, EVENTS, wait_ms());
        for (int i = 0; i < n; i++) {
            Conn *c = events[i].data.ptr;
            if (!c) {
                accept_all(listener);
                continue;
            }
            if (c->open && events[i].events & EPOLLOUT) {
                flush_pending(c);
                process(c);
            }
            if (c->open && events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
                receive(c);
        }
        run_unpaced();
        run_paced();
    }
}
