/* Reads from /proc the CPU time (utime + stime) and resident memory of whole process trees, and the busy time
 * of cores. */
#include <dirent.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_TREE = 256, MAX_PROCESSES = 8192 };

typedef struct {
    double user, system;
    long rss_kb;
} Usage;

/* Returns the text after the command's name in /proc/PID/stat, or NULL if the process has ended. */
static const char *read_stat(int pid, char *b, int size) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *f = fopen(path, "r");
    if (!f)
        return NULL;
    int n = fread(b, 1, size - 1, f);
    fclose(f);
    b[n] = 0;
    char *end = strrchr(b, ')');
    return end ? end + 1 : NULL;
}

static bool contains(const int *set, int n, int x) {
    for (int i = 0; i < n; i++)
        if (set[i] == x)
            return true;
    return false;
}

static int process_tree(int root, int *tree) {
    static int pids[MAX_PROCESSES], parents[MAX_PROCESSES];
    char b[1024];
    int n = 0, m = 1;
    DIR *d = opendir("/proc");
    for (struct dirent *e; d && (e = readdir(d)) && n < MAX_PROCESSES;) {
        pids[n] = atoi(e->d_name);
        const char *stat = pids[n] ? read_stat(pids[n], b, sizeof b) : NULL;
        if (stat && sscanf(stat, " %*c %d", &parents[n]) == 1)
            n++;
    }
    if (d)
        closedir(d);
    tree[0] = root;
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++)
            if (parents[j] == tree[i] && m < MAX_TREE && !contains(tree, m, pids[j]))
                tree[m++] = pids[j];
    return m;
}

static Usage measure(const int *roots, int count) {
    double tick = sysconf(_SC_CLK_TCK);
    long page_kb = sysconf(_SC_PAGESIZE) / 1024;
    Usage sum = {0};
    char b[1024];
    for (int i = 0; i < count; i++) {
        int tree[MAX_TREE], n = process_tree(roots[i], tree);
        for (int j = 0; j < n; j++) {
            unsigned long user, system;
            long rss;
            const char *stat = read_stat(tree[j], b, sizeof b);
            if (!stat || sscanf(stat,
                                " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu %*d %*d %*d %*d %*d"
                                " %*d %*u %*u %ld",
                                &user, &system, &rss) != 3)
                continue;
            sum.user += user / tick;
            sum.system += system / tick;
            sum.rss_kb += rss * page_kb;
        }
    }
    return sum;
}

/* Returns the seconds since boot during which these cores were not idle. Interrupts count, because their time
 * is also in the figure of the interrupted process. A hypervisor's time counts, because it disturbs like a
 * process. */
static double cores_busy(const int *cores, int count) {
    char line[256];
    double seconds = 0;
    FILE *f = fopen("/proc/stat", "r");
    while (f && fgets(line, sizeof line, f)) {
        int core;
        unsigned long user, nice, system, irq, softirq, steal;
        if (sscanf(line, "cpu%d %lu %lu %lu %*u %*u %lu %lu %lu", &core, &user, &nice, &system, &irq,
                   &softirq, &steal) == 7 &&
            contains(cores, count, core))
            seconds += (double)(user + nice + system + irq + softirq + steal) / sysconf(_SC_CLK_TCK);
    }
    if (f)
        fclose(f);
    return seconds;
}
