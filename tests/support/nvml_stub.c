/* A libnvidia-ml.so.1 without a GPU: answers as nvml.h says, from the file that NVML_STUB names.
 *
 * A line is `WHAT GPU VALUE`, GPU `*` for all: `count * 8`, `ecc 2 7`, and `return:FUNCTION 3 15` for a function
 * that fails with an nvmlReturn_t. Later lines win. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define INVALID_ARGUMENT 2
#define INSUFFICIENT_SIZE 7
#define LINKS 18

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gi, ci; } process_t;

static const char *ask(const char *what, int gpu, const char *otherwise)
{
    static char found[128];
    char line[256], key[96], who[16], value[128];
    FILE *file = fopen(getenv("NVML_STUB") ? getenv("NVML_STUB") : "/nonexistent", "r");
    snprintf(found, sizeof found, "%s", otherwise);
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "%95s %15s %127[^\n]", key, who, value) == 3 && !strcmp(key, what)
            && (!strcmp(who, "*") || atoi(who) == gpu))
            strcpy(found, value);
    if (file) fclose(file);
    return found;
}

static unsigned long long number(const char *what, int gpu, const char *otherwise)
{
    return strtoull(ask(what, gpu, otherwise), NULL, 0);
}

static int failure(const char *function, int gpu)
{
    char what[96];
    snprintf(what, sizeof what, "return:%s", function);
    return (int)number(what, gpu, "0");
}

#define TRY(gpu) do { int failed = failure(__func__, gpu); if (failed) return failed; } while (0)
#define GPU(handle) ((int)((long)(handle) - 1))

int nvmlInitWithFlags(unsigned flags) { TRY(-1); return 0; }
int nvmlInit_v2(void) { TRY(-1); return 0; }
int nvmlShutdown(void) { TRY(-1); return 0; }

const char *nvmlErrorString(int code)
{
    static char text[32];
    snprintf(text, sizeof text, "NVML error %d", code);
    return text;
}

int nvmlSystemGetDriverVersion(char *text, unsigned length)
{
    TRY(-1);
    snprintf(text, length, "%s", ask("driver", -1, "580.65.06"));
    return 0;
}

int nvmlDeviceGetCount_v2(unsigned *count) { TRY(-1); *count = number("count", -1, "8"); return 0; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    TRY((int)index);
    *handle = (void *)((long)index + 1);
    return 0;
}

int nvmlDeviceGetMemoryInfo(void *gpu, memory_t *memory)
{
    TRY(GPU(gpu));
    memory->total = number("total", GPU(gpu), "85520809984");
    memory->used = number("used", GPU(gpu), "500000000");
    memory->free = memory->total - memory->used;
    return 0;
}

int nvmlDeviceGetTotalEccErrors(void *gpu, int kind, int counter, unsigned long long *count)
{
    TRY(GPU(gpu));
    if (kind != 1 || counter != 0) return INVALID_ARGUMENT; /* uncorrected, since the driver was loaded */
    *count = number("ecc", GPU(gpu), "0");
    return 0;
}

int nvmlDeviceGetRemappedRows(void *gpu, unsigned *corrected, unsigned *not, unsigned *pending, unsigned *failed)
{
    TRY(GPU(gpu));
    *corrected = *not = 0;
    *pending = number("remap_pending", GPU(gpu), "0");
    *failed = number("remap_failed", GPU(gpu), "0");
    return 0;
}

int nvmlDeviceGetCurrentClocksEventReasons(void *gpu, unsigned long long *bits)
{
    TRY(GPU(gpu));
    *bits = number("clocks", GPU(gpu), "0x1");
    return 0;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *gpu, unsigned long long *bits)
{
    TRY(GPU(gpu));
    *bits = number("clocks", GPU(gpu), "0x1");
    return 0;
}

int nvmlDeviceGetPersistenceMode(void *gpu, int *mode)
{
    TRY(GPU(gpu));
    *mode = (int)number("persistence", GPU(gpu), "1");
    return 0;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *gpu, unsigned *count, process_t *processes)
{
    unsigned room = *count;
    TRY(GPU(gpu));
    *count = number("processes", GPU(gpu), "0");
    if (*count > room) return INSUFFICIENT_SIZE;
    for (unsigned index = 0; index < *count; index++) {
        memset(&processes[index], 0, sizeof *processes);
        processes[index].pid = 4711 + index;
    }
    return 0;
}

int nvmlDeviceGetName(void *gpu, char *text, unsigned length)
{
    TRY(GPU(gpu));
    snprintf(text, length, "%s", ask("name", GPU(gpu), "NVIDIA H100 80GB HBM3"));
    return 0;
}

int nvmlDeviceGetUUID(void *gpu, char *text, unsigned length)
{
    TRY(GPU(gpu));
    snprintf(text, length, "%s-%d", ask("uuid", -1, "GPU-stub"), GPU(gpu));
    return 0;
}

int nvmlDeviceGetNvLinkState(void *gpu, unsigned link, int *is_active)
{
    TRY(GPU(gpu));
    if (link >= LINKS) return INVALID_ARGUMENT;
    *is_active = link >= number("links_down", GPU(gpu), "0");
    return 0;
}
