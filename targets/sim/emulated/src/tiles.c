// AMX for programs of `sim:amx`: a CPU without tiles ends each of their
// instructions with a signal. The handler here does what the manual specifies for
// the instruction and continues behind it. Every other instruction is the CPU's
// own. This text follows `launcher.c`.

typedef float v16 __attribute__((vector_size(64), may_alias, aligned(4)));
typedef unsigned w16 __attribute__((vector_size(64), may_alias, aligned(4)));

enum { TILES = 8, ROWS = 16, ROW_BYTES = 64 };

typedef struct {
    unsigned char palette, start_row, reserved[14];
    unsigned short row_bytes[16];
    unsigned char rows[16];
} shapes;

static struct {
    shapes shapes; // palette 0: no tiles
    char tiles[TILES][ROWS][ROW_BYTES];
} amx __attribute__((aligned(64)));

// Ends the program with a message where a CPU would fault.
static void refuse(const char *what, size bytes)
{
    system_call(WRITE, ERRORS, (i64)what, (i64)bytes, 0, 0, 0);
    leave(5);
}
#define REFUSE(what) refuse("AMX: " what, sizeof("AMX: " what) - 1)

static void configure(const shapes *asked)
{
    memset(&amx, 0, sizeof amx);
    if (asked->palette == 0)
        return;
    int others = asked->start_row;
    for (int i = 0; i < 14; i++)
        others |= asked->reserved[i];
    if (asked->palette > 1 || others)
        REFUSE("ldtilecfg of another palette than 0 and 1, or of more than shapes");
    for (int i = 0; i < 16; i++) {
        int there = asked->row_bytes[i] && asked->rows[i], none = !asked->row_bytes[i] && !asked->rows[i];
        if (asked->row_bytes[i] > ROW_BYTES || asked->rows[i] > ROWS || (there && i >= TILES) || !(there || none))
            REFUSE("ldtilecfg of a shape that no tile has");
    }
    memcpy(&amx.shapes, asked, sizeof amx.shapes);
}

// Returns the number of a configured tile, or ends the program.
static int tile(int number)
{
    if (number >= TILES || !amx.shapes.palette || !amx.shapes.rows[number])
        REFUSE("a tile is used that ldtilecfg did not give");
    return number;
}

static void copy_row(char *to, const char *from, size bytes)
{
    if (bytes == ROW_BYTES)
        *(v16 *)to = *(const v16 *)from;
    else
        memcpy(to, from, bytes);
}

static void load(int to, const char *from, i64 stride)
{
    for (int row = 0; row < amx.shapes.rows[to]; row++)
        copy_row(amx.tiles[to][row], from + row * stride, amx.shapes.row_bytes[to]);
}

static void store(int from, char *to, i64 stride)
{
    for (int row = 0; row < amx.shapes.rows[from]; row++)
        copy_row(to + row * stride, amx.tiles[from][row], amx.shapes.row_bytes[from]);
}

// Intel's manual, TDPBF16PS: products of even and of odd places are summed by
// themselves, each by fused multiply-adds, and both are added at the end.
// Subnormals are zeros. Bytes behind the end of a row cannot be observed.
static void multiply(int sums, int left, int right)
{
    const shapes *s = &amx.shapes;
    if (sums == left || sums == right || left == right)
        REFUSE("tdpbf16ps of a tile with itself");
    if (s->row_bytes[sums] != s->row_bytes[right] || s->rows[sums] != s->rows[left] ||
        s->row_bytes[left] != 4 * s->rows[right] || s->row_bytes[sums] % 4)
        REFUSE("tdpbf16ps of tiles whose shapes do not fit");
    for (int row = 0; row < s->rows[sums]; row++) {
        v16 even = {0}, odd = {0};
        for (int k = 0; k < s->rows[right]; k++) {
            unsigned pair = ((unsigned *)amx.tiles[left][row])[k];
            w16 first = (w16){0} + (pair << 16), second = (w16){0} + (pair & 0xffff0000u);
            w16 pairs = *(w16 *)amx.tiles[right][k];
            even += (v16)first * (v16)(pairs << 16);
            odd += (v16)second * (v16)(pairs & 0xffff0000u);
        }
        *(v16 *)amx.tiles[sums][row] += even + odd;
    }
}

// Indices of the thread's registers in the context that Linux keeps for a signal.
enum { R8 = 0, RDI = 8, RSI, RBP, RBX, RDX, RAX, RCX, RSP, RIP };

typedef struct {
    u64 flags, link, stack[3];
    i64 registers[23];
} context;

// Returns a register by its number in instructions.
static i64 value(const context *now, int number)
{
    static const int places[8] = {RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI};
    return now->registers[number < 8 ? places[number] : R8 + number - 8];
}

// The operands behind the opcode: a tile, or memory and the stride in a register.
typedef struct {
    int reg, rm; // numbers of registers or tiles
    int is_memory;
    char *address; // without the stride's register
    i64 stride;
    const unsigned char *end;
} operands;

static i64 displacement(const unsigned char *at, int bytes)
{
    i64 found = bytes == 1 ? (signed char)at[0] : 0;
    if (bytes == 4) {
        int word;
        memcpy(&word, at, sizeof word);
        found = word;
    }
    return found;
}

static operands decode(const context *now, const unsigned char *code)
{
    const int base_high = code[1] & 0x20 ? 0 : 8, index_high = code[1] & 0x40 ? 0 : 8;
    const unsigned char *at = code + 4;
    const int form = *at >> 6, low = *at & 7;
    operands found = {.reg = *at >> 3 & 7, .rm = low, .is_memory = form != 3};
    at++;
    if (!found.is_memory) {
        found.end = at;
        return found;
    }
    int bytes = form == 1 ? 1 : form == 2 ? 4 : 0;
    int base = low + base_high, relative = 0, none = 0;
    if (low == 4) {
        const int index = (*at >> 3 & 7) + index_high;
        found.stride = index == 4 ? 0 : (i64)((u64)value(now, index) << (*at >> 6));
        none = (*at & 7) == 5 && form == 0;
        base = (*at & 7) + base_high;
        at++;
    } else {
        relative = low == 5 && form == 0;
    }
    if (none || relative)
        bytes = 4;
    found.end = at + bytes;
    i64 start = relative ? (i64)found.end : none ? 0 : value(now, base);
    found.address = (char *)(start + displacement(at, bytes));
    return found;
}

// Three bytes of prefix (map 0F38, W = 0, L = 0), opcode, operands. 0: it is not
// one of AMX that kernels may have.
static const unsigned char *execute(const context *now, const unsigned char *code)
{
    if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x84))
        return 0;
    enum { NONE, P66, PF3, PF2 };
    const int prefix = code[2] & 3, opcode = code[3];
    const int third = ~code[2] >> 3 & 15;
    const operands o = decode(now, code);
    if (opcode == 0x49 && prefix == NONE && o.is_memory)
        configure((const shapes *)(o.address + o.stride));
    else if (opcode == 0x49 && prefix == NONE)
        memset(&amx, 0, sizeof amx);
    else if (opcode == 0x49 && prefix == PF2 && !o.is_memory)
        memset(amx.tiles[tile(o.reg)], 0, sizeof amx.tiles[0]);
    else if (opcode == 0x4b && (prefix == PF2 || prefix == P66) && o.is_memory)
        load(tile(o.reg), o.address, o.stride);
    else if (opcode == 0x4b && prefix == PF3 && o.is_memory)
        store(tile(o.reg), o.address, o.stride);
    else if (opcode == 0x5c && prefix == PF3 && !o.is_memory)
        multiply(tile(o.reg), tile(o.rm), tile(third));
    else
        return 0;
    return o.end;
}

typedef struct {
    void (*handler)(int signal, void *info, context *now);
    u64 flags;
    void (*restorer)(void);
    u64 mask;
} action;

enum { SIGNAL_ILLEGAL = 4, SET_ACTION = 13, SIGINFO = 4, RESTORER = 0x4000000 };

__asm__(".globl leave_signal\n"
        "leave_signal:\n"
        "    mov $15, %eax\n"
        "    syscall\n");
extern void leave_signal(void);

static void on_illegal(int signal, void *info, context *now)
{
    (void)signal, (void)info;
    const unsigned flush_both_ways = 0x1f80 | 0x8040;
    __builtin_ia32_ldmxcsr(flush_both_ways);
    const unsigned char *next = execute(now, (const unsigned char *)now->registers[RIP]);
    if (next) {
        now->registers[RIP] = (i64)next;
    } else {
        // The instruction runs once more, and its signal ends the program.
        const action as_ever = {.flags = RESTORER, .restorer = leave_signal};
        system_call(SET_ACTION, SIGNAL_ILLEGAL, (i64)&as_ever, 0, sizeof as_ever.mask, 0, 0);
    }
}

static void begin(void)
{
    const action ours = {on_illegal, SIGINFO | RESTORER, leave_signal, 0};
    system_call(SET_ACTION, SIGNAL_ILLEGAL, (i64)&ours, 0, sizeof ours.mask, 0, 0);
}

// A thread that keeps its tiles makes every later switch of threads slower.
static void end_of_launch(void)
{
    if (amx.shapes.palette)
        REFUSE("the launch ended without tilerelease");
}
