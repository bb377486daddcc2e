// Runs blocks of a kernel on request. Each kernel of `sim:neon*` and `sim:amx` is
// linked with this text to a Linux program without a C library. File 0 is the
// memory of the device, file 1 the socket of requests. MEMORY_START and
// MEMORY_BYTES are defined above this text.

typedef __INT64_TYPE__ i64;
typedef __UINT64_TYPE__ u64;
typedef __SIZE_TYPE__ size;

enum { MEMORY = 0, REQUESTS = 1, ERRORS = 2, MOST_ARGS = 128 };

// Entries without scratch memory ignore the last argument.
typedef void kernel_entry(void *const *args, i64 first, i64 last, i64 grid_x, void *scratch);

typedef struct {
    kernel_entry *entry;
    i64 first, last, grid_x;
    void *scratch;
    u64 count; // of argument values, which follow
} request;

// Compilers call these functions for copies and zeroes. The empty statement keeps
// them from recognising the loops below as copies, which would call themselves.
void *memcpy(void *to, const void *from, size bytes)
{
    for (size i = 0; i < bytes; i++) {
        ((char *)to)[i] = ((const char *)from)[i];
        __asm__("");
    }
    return to;
}

void *memmove(void *to, const void *from, size bytes)
{
    if ((u64)to - (u64)from >= bytes)
        return memcpy(to, from, bytes);
    for (size i = bytes; i-- > 0;) {
        ((char *)to)[i] = ((const char *)from)[i];
        __asm__("");
    }
    return to;
}

void *memset(void *to, int value, size bytes)
{
    for (size i = 0; i < bytes; i++) {
        ((char *)to)[i] = (char)value;
        __asm__("");
    }
    return to;
}

#if defined __aarch64__

enum { READ = 63, WRITE = 64, EXIT = 93, MMAP = 222 };

static i64 system_call(i64 number, i64 a, i64 b, i64 c, i64 d, i64 e, i64 f)
{
    register i64 x8 __asm__("x8") = number;
    register i64 x0 __asm__("x0") = a;
    register i64 x1 __asm__("x1") = b;
    register i64 x2 __asm__("x2") = c;
    register i64 x3 __asm__("x3") = d;
    register i64 x4 __asm__("x4") = e;
    register i64 x5 __asm__("x5") = f;
    __asm__ volatile("svc 0"
                     : "+r"(x0)
                     : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5)
                     : "memory");
    return x0;
}

__asm__(".globl _start\n"
        "_start:\n"
        "    mov x29, #0\n"
        "    mov x30, #0\n"
        "    bl launcher\n");

#elif defined __x86_64__

enum { READ = 0, WRITE = 1, EXIT = 60, MMAP = 9 };

static i64 system_call(i64 number, i64 a, i64 b, i64 c, i64 d, i64 e, i64 f)
{
    register i64 r10 __asm__("r10") = d;
    register i64 r8 __asm__("r8") = e;
    register i64 r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "+a"(number)
                     : "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return number;
}

__asm__(".globl _start\n"
        "_start:\n"
        "    xor %ebp, %ebp\n"
        "    and $-64, %rsp\n"
        "    call launcher\n");

#endif

static void leave(int status)
{
    for (;;)
        system_call(EXIT, status, 0, 0, 0, 0, 0);
}

// Returns true if all bytes came; the other side may have gone.
static int receive(void *to, u64 bytes)
{
    for (u64 done = 0; done < bytes;) {
        i64 got = system_call(READ, REQUESTS, (i64)((char *)to + done), (i64)(bytes - done), 0, 0, 0);
        if (got <= 0)
            return 0;
        done += (u64)got;
    }
    return 1;
}

// The hooks of an emulated instruction set, in a text of its own or empty.
static void begin(void);
static void end_of_launch(void);

static void serve(void)
{
    request asked;
    u64 values[MOST_ARGS];
    void *args[MOST_ARGS];
    while (receive(&asked, sizeof asked)) {
        if (asked.count > MOST_ARGS || !receive(values, asked.count * sizeof *values))
            leave(3);
        for (u64 i = 0; i < asked.count; i++)
            args[i] = &values[i];
        asked.entry(args, asked.first, asked.last, asked.grid_x, asked.scratch);
        end_of_launch();
        u64 done = asked.count;
        if (system_call(WRITE, REQUESTS, (i64)&done, sizeof done, 0, 0, 0) != sizeof done)
            leave(4);
    }
}

__attribute__((used)) void launcher(void)
{
    const i64 read_write = 3, shared_fixed = 0x11;
    i64 start = MEMORY_START;
    if (system_call(MMAP, start, MEMORY_BYTES, read_write, shared_fixed, MEMORY, 0) != start)
        leave(2);
    begin();
    serve();
    leave(0);
}
