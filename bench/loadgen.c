/* A streaming load generator: closed loop, keep-alive HTTP/1.1, one thread, epoll.
 *
 * Reports latencies, and the CPU time (utime + stime) and resident memory of the target's process tree
 * between warm-up and end. usage() below lists all options. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "answer.h"
#include "measure.h"

enum { MAX_PIDS = 16, MAX_SAMPLES = 4000000 };

static void usage(void) {
    fputs("loadgen [options]\n"
          "  -h HOST       127.0.0.1\n"
          "  -p PORT       9001\n"
          "  -m METHOD     POST\n"
          "  -P PATH       /v1/chat/completions\n"
          "  -H LINE       a header; may be given several times\n"
          "  -R FILE       lines PATH<TAB>HEADER[<TAB>HEADER ...], one for each caller, used in order\n"
          "                instead of -P\n"
          "  -b TEXT       the body; -f FILE reads it\n"
          "  -c N          connections, each with one request at a time (32)\n"
          "  -r MS         time in which the connections are opened (0)\n"
          "  -w S          warm-up before the recording (1)\n"
          "  -d S          length of the recording (5)\n"
          "  -n N          ends the recording early after this many answers\n"
          "  -D            waits for open requests at the end instead of cutting them\n"
          "  -E MARK       end marker within a data line ([DONE]), or the start of an event line\n"
          "                ('event: done'); '' for none\n"
          "  -e N          minimum number of events in a valid answer\n"
          "  -x            answers are not event streams\n"
          "  -T S          timeout of one request (30)\n"
          "  -i PID[,PID]  process trees to measure\n"
          "  -k PID,CORE.. reports the share of these cores used by processes outside this tree\n"
          "  -C N          the core to run on\n"
          "  -j            JSON instead of text\n"
          "  -L TEXT       label of the report\n",
          stderr);
    exit(2);
}

static struct {
    const char *host, *path, *method, *end, *label, *body, *rotate;
    char headers[16384];
    int port, conc, ramp_ms, expect;
    bool plain, json, drain;
    long requests;
    double duration, warmup, timeout;
    int pids[MAX_PIDS], pid_count;
    int ours[MAX_PIDS], ours_count; /* our root process, then the cores */
} opt = {
    .host = "127.0.0.1",
    .path = "/v1/chat/completions",
    .method = "POST",
    .end = "[DONE]",
    .label = "",
    .body = "{\"model\":\"stub\",\"stream\":true,\"stream_options\":{\"include_usage\":true},"
            "\"messages\":[{\"role\":\"user\",\"content\":\"Tell me about bridges.\"}]}",
    .port = 9001,
    .conc = 32,
    .requests = 1000000000,
    .duration = 5,
    .warmup = 1,
    .timeout = 30,
};

typedef struct {
    char *bytes;
    int len;
} Request;

static Request *requests;
static long request_count, next_request;

enum State { CONNECTING = 1, IN_FLIGHT, IDLE };

typedef struct {
    int fd;
    enum State state;
    uint64_t sent_at;
    Answer answer;
} Conn;

static Conn *conns;
static int poller;
static bool recording, stopping;
static long ok_count, error_count, event_count; /* while recording */
static long sent, good, bad, stale;             /* of the whole run */
static char first_error[200];
static double *first_ms, *total_ms;
static long sample_count;

/* ---- requests ---- */

static Request build_request(const char *path, const char *headers) {
    Request r;
    bool get = !strcmp(opt.method, "GET");
    char length[128] = "";
    if (!get)
        snprintf(length, sizeof length,
                 "Accept: text/event-stream\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n",
                 strlen(opt.body));
    r.len = asprintf(&r.bytes, "%s %s HTTP/1.1\r\nHost: %s:%d\r\n%s%s%s\r\n%s", opt.method, path, opt.host,
                     opt.port, length, opt.headers, headers, get ? "" : opt.body);
    if (r.len < 0)
        abort();
    return r;
}

static void add_request(Request r) {
    if ((request_count & (request_count - 1)) == 0)
        requests = realloc(requests, (request_count ? 2 * request_count : 1) * sizeof *requests);
    requests[request_count++] = r;
}

static void add_caller(const char *path, char *header) {
    char headers[HEAD_SIZE] = "";
    for (char *h = strtok(header, "\t"); h; h = strtok(NULL, "\t")) {
        size_t used = strlen(headers);
        snprintf(headers + used, sizeof headers - used, "%s\r\n", h);
    }
    add_request(build_request(path, headers));
}

static void read_callers(void) {
    FILE *f = fopen(opt.rotate, "r");
    if (!f) {
        perror(opt.rotate);
        exit(2);
    }
    char *line = NULL;
    size_t size = 0;
    for (ssize_t n; (n = getline(&line, &size, f)) > 0;) {
        while (n && (line[n - 1] == '\n' || line[n - 1] == '\r'))
            line[--n] = 0;
        char *tab = strchr(line, '\t');
        if (!tab)
            continue;
        *tab = 0;
        add_caller(line, tab + 1);
    }
    free(line);
    fclose(f);
    if (!request_count) {
        fprintf(stderr, "%s: no line PATH<TAB>HEADER\n", opt.rotate);
        exit(2);
    }
}

/* ---- connections ---- */

static void failed(Conn *c, const char *why) {
    bad++;
    error_count += recording;
    if (first_error[0])
        return;
    c->answer.line[c->answer.line_len] = 0; /* the beginning of an error's body */
    snprintf(first_error, sizeof first_error, "%s (status %d) %s", why, c->answer.status, c->answer.line);
    for (char *p = first_error; *p; p++)
        if (*p == '"' || *p == '\\' || (unsigned char)*p < ' ')
            *p = '\''; /* it goes into JSON */
}

static void connect_again(Conn *c) {
    if (c->state)
        close(c->fd);
    c->state = CONNECTING;
    c->answer.status = 0;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    int one = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(opt.port)};
    inet_pton(AF_INET, opt.host, &a.sin_addr);
    connect(c->fd, (struct sockaddr *)&a, sizeof a); /* epoll reports the outcome */
    struct epoll_event e = {.events = EPOLLIN | EPOLLOUT, .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &e);
}

static void begin(Conn *c) {
    c->sent_at = now();
    expect_answer(&c->answer, opt.end);
    c->state = IN_FLIGHT;
    sent++;
    Request *r = &requests[next_request++ % request_count];
    if (send(c->fd, r->bytes, r->len, MSG_NOSIGNAL) != r->len) {
        failed(c, "short write");
        c->answer.close_after = true;
    }
}

static void finish(Conn *c, bool whole) {
    char why[80];
    uint64_t t = now();
    c->state = IDLE;
    if (!whole || c->answer.status != 200) {
        failed(c, "bad response");
    } else if (!opt.plain && opt.end[0] && !c->answer.done) {
        failed(c, "no end marker");
    } else if (c->answer.events < opt.expect) {
        snprintf(why, sizeof why, "too few events: %ld", c->answer.events);
        failed(c, why);
    } else {
        good++;
        if (!recording)
            return;
        ok_count++;
        if (sample_count == MAX_SAMPLES)
            return;
        total_ms[sample_count] = (t - c->sent_at) / 1e6;
        first_ms[sample_count++] = ((c->answer.first_at ? c->answer.first_at : t) - c->sent_at) / 1e6;
    }
}

/* ---- the loop ---- */

static void after_answer(Conn *c) {
    if (stopping)
        return;
    if (c->answer.close_after)
        connect_again(c);
    else
        begin(c);
}

static void on_connecting(Conn *c, uint32_t events) {
    if (events & (EPOLLERR | EPOLLHUP) || !(events & EPOLLOUT)) {
        failed(c, "connect");
        usleep(1000);
        connect_again(c);
        return;
    }
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &e);
    if (!stopping)
        begin(c);
}

static void on_readable(Conn *c) {
    static char b[262144];
    int n = recv(c->fd, b, sizeof b, 0);
    if (n < 0 && errno == EAGAIN)
        return;
    long before = c->answer.events;
    int outcome = n > 0 ? read_answer(&c->answer, b, n) : -1;
    if (recording)
        event_count += c->answer.events - before;
    if (n > 0 && outcome == 0)
        return;
    if (outcome == 1) {
        finish(c, true);
        after_answer(c);
        return;
    }
    if (c->state == IN_FLIGHT) {
        bool by_close = n <= 0 && c->answer.head_seen && !c->answer.chunked && c->answer.left < 0;
        bool unanswered = n <= 0 && c->answer.head_len == 0;
        if (unanswered && good + bad > 0)
            stale++; /* the target may close a kept-alive connection at any time */
        else
            finish(c, by_close);
    }
    if (!stopping) {
        connect_again(c);
        return;
    }
    c->state = IDLE;
    epoll_ctl(poller, EPOLL_CTL_DEL, c->fd, NULL);
}

static int in_flight(int opened) {
    int n = 0;
    for (int i = 0; i < opened; i++)
        n += conns[i].state == IN_FLIGHT;
    return n;
}

static void end_overdue(int opened, uint64_t t) {
    for (int i = 0; i < opened; i++) {
        Conn *c = &conns[i];
        if (c->state != IN_FLIGHT || t - c->sent_at <= opt.timeout * 1e9)
            continue;
        failed(c, "timeout");
        connect_again(c);
    }
}

typedef struct {
    Usage before, after;
    long rss0_kb, rss_max_kb, most_in_flight;
    double seconds, others; /* s */
} Result;

/* Returns the seconds since boot that processes outside our tree used on our cores. */
static double others(void) {
    if (opt.ours_count < 2)
        return 0;
    Usage ours = measure(opt.ours, 1);
    return cores_busy(opt.ours + 1, opt.ours_count - 1) - ours.user - ours.system;
}

static Result run(void) {
    static struct epoll_event events[2048];
    Result r = {.before = measure(opt.pids, opt.pid_count)};
    r.rss0_kb = r.rss_max_kb = r.before.rss_kb;
    uint64_t start = now(), record_at = start + opt.warmup * 1e9, recorded_at = 0, looked_at = 0;
    int opened = 0;
    for (;;) {
        uint64_t t = now();
        if (!recording && !stopping && t >= record_at) {
            recording = true;
            recorded_at = t;
            r.before = measure(opt.pids, opt.pid_count);
            r.others = -others();
        }
        if (recording && (t - recorded_at >= opt.duration * 1e9 || ok_count + error_count >= opt.requests)) {
            recording = false;
            stopping = true;
            r.seconds = (t - recorded_at) / 1e9;
            r.after = measure(opt.pids, opt.pid_count);
            r.others += others();
            if (r.after.rss_kb > r.rss_max_kb)
                r.rss_max_kb = r.after.rss_kb;
        }
        if (stopping &&
            (!opt.drain || !in_flight(opened) || t - recorded_at > (opt.duration + opt.timeout) * 1e9))
            return r;
        if (!stopping && t - looked_at > 250000000u) {
            looked_at = t;
            long rss = measure(opt.pids, opt.pid_count).rss_kb, n = in_flight(opened);
            if (rss > r.rss_max_kb)
                r.rss_max_kb = rss;
            if (n > r.most_in_flight)
                r.most_in_flight = n;
            end_overdue(opened, t);
        }
        int wanted = opt.ramp_ms ? opt.conc * ((t - start) / 1e6 / opt.ramp_ms) + 1 : opt.conc;
        while (!stopping && opened < wanted && opened < opt.conc)
            connect_again(&conns[opened++]);
        int n = epoll_wait(poller, events, 2048, opened < opt.conc ? 1 : 50);
        for (int i = 0; i < n; i++) {
            Conn *c = events[i].data.ptr;
            if (c->state == CONNECTING)
                on_connecting(c, events[i].events);
            else
                on_readable(c);
        }
    }
}

/* ---- report ---- */

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double percentile(const double *sorted, double p) {
    return sample_count ? sorted[(long)(p * (sample_count - 1) + 0.5)] : 0;
}

static void report(const Result *r) {
    static const char json[] =
        "{\"label\":\"%s\",\"conc\":%d,\"secs\":%.2f,\"ok\":%ld,\"err\":%ld,\"rps\":%.1f,\"events\":%ld,"
        "\"eps\":%.0f,\"ttft50\":%.2f,\"ttft90\":%.2f,\"ttft99\":%.2f,\"tot50\":%.2f,\"tot90\":%.2f,"
        "\"tot99\":%.2f,\"cpu_u\":%.2f,\"cpu_s\":%.2f,\"cpu_pct\":%.0f,\"others_pct\":%.0f,\"us_ev\":%.2f,"
        "\"us_req\":%.1f,"
        "\"rss0_kb\":%ld,\"rssmax_kb\":%ld,\"maxinfl\":%ld,\"sent\":%ld,\"good\":%ld,\"bad\":%ld,\"stale\":%"
        "ld,"
        "\"errmsg\":\"%s\"}\n";
    static const char text[] =
        "%-22s c=%d %.1fs ok=%ld err=%ld rps=%.1f ev=%ld ev/s=%.0f ttft50/90/99=%.2f/%.2f/%.2fms "
        "tot=%.2f/%.2f/%.2fms cpu u=%.2f s=%.2f (%.0f%%, others %.0f%%) us/ev=%.2f us/req=%.1f rss0=%ldKB "
        "rssmax=%ldKB "
        "infl=%ld sent=%ld good=%ld bad=%ld stale=%ld %s\n";
    double user = r->after.user - r->before.user, system = r->after.system - r->before.system;
    double cpu = user + system;
    double others_pct = r->others > 0 ? 100 * r->others / r->seconds : 0;
    qsort(first_ms, sample_count, sizeof *first_ms, by_value);
    qsort(total_ms, sample_count, sizeof *total_ms, by_value);
    printf(opt.json ? json : text, opt.label, opt.conc, r->seconds, ok_count, error_count,
           ok_count / r->seconds, event_count, event_count / r->seconds, percentile(first_ms, .5),
           percentile(first_ms, .9), percentile(first_ms, .99), percentile(total_ms, .5),
           percentile(total_ms, .9), percentile(total_ms, .99), user, system, 100 * cpu / r->seconds,
           others_pct, event_count ? 1e6 * cpu / event_count : 0, ok_count ? 1e6 * cpu / ok_count : 0,
           r->rss0_kb, r->rss_max_kb, r->most_in_flight, sent, good, bad, stale, first_error);
}

/* ---- options ---- */

static char *read_file(const char *path) {
    static char b[131072];
    FILE *f = fopen(path, "r");
    if (!f) {
        perror(path);
        exit(2);
    }
    b[fread(b, 1, sizeof b - 1, f)] = 0;
    fclose(f);
    return b;
}

static void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof set, &set);
}

static void add_header(const char *line) {
    size_t used = strlen(opt.headers);
    if (used + strlen(line) + 3 > sizeof opt.headers)
        usage();
    sprintf(opt.headers + used, "%s\r\n", line);
}

static void add_numbers(char *list, int *numbers, int *count) {
    for (char *number = strtok(list, ","); number && *count < MAX_PIDS; number = strtok(NULL, ","))
        numbers[(*count)++] = atoi(number);
}

static void read_options(int argc, char **argv) {
    for (int o; (o = getopt(argc, argv, "h:p:m:P:H:R:b:f:c:r:w:d:n:DE:e:xT:i:k:C:jL:")) != -1;)
        switch (o) {
        case 'h': opt.host = optarg; break;
        case 'p': opt.port = atoi(optarg); break;
        case 'm': opt.method = optarg; break;
        case 'P': opt.path = optarg; break;
        case 'H': add_header(optarg); break;
        case 'R': opt.rotate = optarg; break;
        case 'b': opt.body = optarg; break;
        case 'f': opt.body = read_file(optarg); break;
        case 'c': opt.conc = atoi(optarg); break;
        case 'r': opt.ramp_ms = atoi(optarg); break;
        case 'w': opt.warmup = atof(optarg); break;
        case 'd': opt.duration = atof(optarg); break;
        case 'n': opt.requests = atol(optarg); break;
        case 'D': opt.drain = true; break;
        case 'E': opt.end = optarg; break;
        case 'e': opt.expect = atoi(optarg); break;
        case 'x': opt.plain = true; break;
        case 'T': opt.timeout = atof(optarg); break;
        case 'i': add_numbers(optarg, opt.pids, &opt.pid_count); break;
        case 'k': add_numbers(optarg, opt.ours, &opt.ours_count); break;
        case 'C': pin(atoi(optarg)); break;
        case 'j': opt.json = true; break;
        case 'L': opt.label = optarg; break;
        default: usage();
        }
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);

    read_options(argc, argv);
    if (opt.rotate)
        read_callers();
    else
        add_request(build_request(opt.path, ""));
    first_ms = malloc(MAX_SAMPLES * sizeof *first_ms);
    total_ms = malloc(MAX_SAMPLES * sizeof *total_ms);
    conns = calloc(opt.conc, sizeof *conns);
    poller = epoll_create1(0);
    Result r = run();
    report(&r);
    return 0;
}
