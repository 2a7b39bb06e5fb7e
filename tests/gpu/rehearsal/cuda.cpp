// A CUDA runtime and driver, cuBLAS, cuDNN and NCCL that compute nothing, for LD_PRELOAD.
// The memory of a device is host memory, a kernel is counted and dropped, and NCCL's calls really
// exchange data between processes. So the host's side of PyTorch's CUDA path runs as if on GPUs:
// streams, events, pinned memory, the current device, dtypes and memory formats, every check of
// arguments, errors and hangs. It proves no number, no race and no speed. In the environment:
//
//   REHEARSAL_GPUS=2              how many devices there are (1)
//   REHEARSAL_MEMORY=3            allocations after which they are full
//   REHEARSAL_HANG=launch:500:1   the 500th "launch" of rank 1 hangs, or of any counted name
//   REHEARSAL_REPORT=1            say at the end what was counted of each device
#include <driver_types.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

// What only has to succeed: a function of C does not mind arguments that it does not name.
#define NOTHING(name) int name() { return 0; }
#define COUNTED(name) int name() { return count(#name), 0; }
#define WAITING(name) int name() { return count("wait " #name), 0; }
// What makes an object that is only passed on, and what gives a number by its first or second, or
// a number of bytes by its last argument.
#define HANDLE(name) int name(void** handle) { return *handle = anything, 0; }
#define FIRST(name, number) int name(int* first) { return *first = number, 0; }
#define SECOND(name, number) int name(void*, int* second) { return *second = number, 0; }
#define NO_BYTES(name, ...) int name(__VA_ARGS__, size_t* bytes) { return *bytes = 0, 0; }
#define P void*

static std::mutex mutex;
static std::map<std::string, long> counts;
static std::atomic<bool> hanging{false}, network_error{false};
static thread_local int current = 0;  // device
static char anything[1 << 16];

static std::string setting(const char* name, const char* otherwise) {
  return getenv(name) ? getenv(name) : otherwise;
}

static int devices() { return std::stoi(setting("REHEARSAL_GPUS", "1")); }

static long count(const std::string& name) {
  std::string hang = setting("REHEARSAL_HANG", ""), rank = setting("RANK", "0");
  mutex.lock();
  long n = ++counts[name];
  mutex.unlock();
  std::string here = name + ":" + std::to_string(n);
  bool nccl = name.rfind("nccl", 0) == 0;
  if (hang == here || hang == here + ":" + rank) hanging = true, network_error = nccl;
  while (hanging && !nccl) sleep(1);  // NCCL itself does not wait for what it has begun
  return n;
}

static void count_on_device(std::string name) { count(name + " on " + std::to_string(current)); }

__attribute__((destructor)) static void report() {
  if (setting("REHEARSAL_REPORT", "").empty()) return;
  for (auto& [name, n] : counts)
    if (name.find(" on ") != std::string::npos)
      fprintf(stderr, "[rehearsal] process %d: %s: %ld\n", getpid(), name.c_str(), n);
}

struct Block { size_t size; int kind, device; };
static std::map<uintptr_t, Block> blocks;  // kind 1 is pinned memory, 2 a device's, 0 all else

static Block block_of(const void* pointer) {
  std::lock_guard<std::mutex> guard(mutex);
  auto next = blocks.upper_bound((uintptr_t)pointer);
  if (next == blocks.begin()) return {0, 0, -2};
  auto [start, block] = *std::prev(next);
  return (uintptr_t)pointer < start + block.size ? block : Block{0, 0, -2};
}

static int allocate(void** pointer, size_t size, int kind) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  *pointer = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, -1, 0);
  std::lock_guard<std::mutex> guard(mutex);
  blocks[(uintptr_t)*pointer] = {size, kind, current};
  return 0;
}

struct Event { std::chrono::duration<float, std::milli> at; bool timing, recorded; };
struct Size { unsigned x, y, z; };

// NCCL among processes of one machine: they meet in shared memory. A call is done when it returns.
struct Id { unsigned char bytes[128]; };
struct Shared { std::atomic<int> arrived, round; };
struct Group { int rank, size; Shared* shared; char* data; };
static const size_t PART = 4 << 20;  // bytes of each rank that are exchanged at once

static void meet(Group* group) {
  int round = group->shared->round;
  if (++group->shared->arrived == group->size) {
    group->shared->arrived = 0;
    ++group->shared->round;
  }
  while (group->shared->round == round) usleep(50);
}

// Calls take(rank, its bytes, where they begin, how many) for all parts of all ranks, in order.
template <class Take>
static int exchange(Group* group, const void* mine, size_t size, Take take) {
  for (size_t at = 0; at < size; at += PART) {
    size_t n = std::min(PART, size - at);
    memcpy(group->data + group->rank * PART, (const char*)mine + at, n);
    meet(group);
    for (int r = 0; r < group->size; r++) take(r, group->data + r * PART, at, n);
    meet(group);
  }
  return 0;
}

template <class T>
static void add(char* to, const char* from, size_t size) {
  for (size_t i = 0; i < size / sizeof(T); i++) ((T*)to)[i] += ((const T*)from)[i];
}
static const size_t WIDTH[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};  // of NCCL's types, in bytes

extern "C" {
// For a test: how often what begins with this name was called since it last asked.
long rehearsal_count(const char* beginning) {
  std::lock_guard<std::mutex> guard(mutex);
  long sum = 0;
  for (auto& [name, n] : counts)
    if (name.rfind(beginning, 0) == 0) sum += n, n = 0;
  return sum;
}

// Devices, such as they could be.
FIRST(cudaGetDeviceCount, devices())
int cudaSetDevice(int device) {
  return device < devices() ? current = device, cudaSuccess : cudaErrorInvalidDevice;
}
int cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  *p = {};
  strcpy(p->name, "Rehearsal");
  p->major = 9, p->multiProcessorCount = 132, p->warpSize = 32, p->totalGlobalMem = 80ull << 30;
  p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048, p->pciBusID = device + 1;
  p->sharedMemPerBlock = p->sharedMemPerBlockOptin = 48 << 10, p->l2CacheSize = 50 << 20;
  for (int i : {0, 1, 2}) p->maxThreadsDim[i] = 64, p->maxGridSize[i] = 65535;
  return 0;
}
int cudaDeviceGetAttribute(int* value, int attribute, int) {
  static std::map<int, int> known = {
      {cudaDevAttrComputeCapabilityMajor, 9}, {cudaDevAttrComputeCapabilityMinor, 0},
      {cudaDevAttrMultiProcessorCount, 132},  {cudaDevAttrMaxThreadsPerBlock, 1024}};
  return *value = known.count(attribute) ? known[attribute] : 1, 0;
}
int cudaDeviceGetStreamPriorityRange(int* least, int* most) { return *least = 0, *most = -5, 0; }
FIRST(cudaGetDevice, current) FIRST(cudaDeviceCanAccessPeer, 1)

int cudaMemGetInfo(size_t* left, size_t* total) { return *left = *total = 80ull << 30, 0; }
const char* cudaGetErrorString(int) { return "rehearsed error"; }
NOTHING(cudaGetLastError) NOTHING(cudaPeekAtLastError) NOTHING(cudaDeviceEnablePeerAccess)

// Memory. The host waits for a copy from or to memory that is not pinned.
int cudaMalloc(void** pointer, size_t size) {
  count_on_device("cudaMalloc");
  bool full = count("cudaMalloc") > std::stol(setting("REHEARSAL_MEMORY", "1000000"));
  return full ? cudaErrorMemoryAllocation : allocate(pointer, size, 2);
}
int cudaHostAlloc(void** pointer, size_t size) { return allocate(pointer, size, 1); }
int cudaFree(void* pointer) {
  std::lock_guard<std::mutex> guard(mutex);
  auto block = blocks.find((uintptr_t)pointer);
  if (block == blocks.end()) return pointer ? cudaErrorInvalidValue : cudaSuccess;
  munmap(pointer, block->second.size);
  return blocks.erase(block), 0;
}
int cudaPointerGetAttributes(cudaPointerAttributes* found, void* pointer) {
  auto [size, kind, device] = block_of(pointer);
  *found = {(cudaMemoryType)kind, device, pointer, pointer};
  return 0;
}
int cudaMemcpyAsync(void* to, const void* from, size_t size) {
  count(block_of(from).kind && block_of(to).kind ? "copy" : "wait copy");
  return memcpy(to, from, size), 0;
}
int cudaMemsetAsync(void* to, int value, size_t size) { return memset(to, value, size), 0; }

// Streams and events: what is asked for is done at once.
HANDLE(cudaStreamCreateWithPriority) NOTHING(cudaEventQuery)
NOTHING(cudaThreadExchangeStreamCaptureMode) COUNTED(cudaStreamWaitEvent)
WAITING(cudaStreamSynchronize) WAITING(cudaEventSynchronize) WAITING(cudaDeviceSynchronize)
SECOND(cudaStreamIsCapturing, 0) SECOND(cudaStreamGetCaptureInfo, 0)
int cudaEventCreateWithFlags(Event** event, unsigned flags) {
  return *event = new Event{{}, !(flags & cudaEventDisableTiming), false}, 0;
}
int cudaEventCreate(Event** event) { return cudaEventCreateWithFlags(event, 0); }
int cudaEventDestroy(Event* event) { return delete event, 0; }
int cudaEventRecord(Event* event) {
  event->at = std::chrono::steady_clock::now().time_since_epoch();
  return event->recorded = true, 0;
}
int cudaEventRecordWithFlags(Event* event) { return cudaEventRecord(event); }
int cudaEventElapsedTime(float* milliseconds, Event* start, Event* end) {
  *milliseconds = (end->at - start->at).count();
  bool known = start->timing && end->timing && start->recorded && end->recorded;
  return known ? cudaSuccess : cudaErrorInvalidResourceHandle;
}
// Kernels.
HANDLE(__cudaRegisterFatBinary) NOTHING(__cudaRegisterFunction) NOTHING(__cudaRegisterVar)
NOTHING(__cudaRegisterFatBinaryEnd) NOTHING(__cudaPushCallConfiguration)
NOTHING(__cudaUnregisterFatBinary) HANDLE(cuCtxGetCurrent)
int __cudaPopCallConfiguration(Size* grid, Size* block, size_t* shared, void** stream) {
  return *grid = *block = {1, 1, 1}, *shared = 0, *stream = nullptr, 0;
}
int __cudaGetKernel(const void** kernel, const void* function) { return *kernel = function, 0; }
int cudaLaunchKernel() { return count_on_device("launch"), count("launch"), 0; }
int __cudaLaunchKernel() { return cudaLaunchKernel(); }
int cudaFuncGetAttributes(cudaFuncAttributes* a) {
  return *a = {}, a->maxThreadsPerBlock = 1024, a->ptxVersion = a->binaryVersion = 90, 0;
}
FIRST(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, 2)
// The driver: its functions are asked for by name.
NOTHING(nothing)
int cudaGetDriverEntryPointByVersion(const char*, void** f, unsigned, unsigned long, int* found) {
  return *f = (void*)nothing, *found = 0;
}
int cuDevicePrimaryCtxGetState(int, int* flags, int* on) { return *flags = 0, *on = 1, 0; }

// cuBLAS and cuDNN.
HANDLE(cublasCreate_v2) HANDLE(cublasLtMatmulDescCreate) HANDLE(cublasLtMatrixLayoutCreate)
HANDLE(cublasLtMatmulPreferenceCreate) HANDLE(cudnnCreate) HANDLE(cudnnCreateTensorDescriptor)
NOTHING(cublasSetStream_v2) NOTHING(cublasSetWorkspace_v2) NOTHING(cublasSetMathMode)
NOTHING(cublasLtMatmulDescDestroy) NOTHING(cublasLtMatmulDescSetAttribute)
NOTHING(cublasLtMatrixLayoutDestroy) NOTHING(cublasLtMatmulPreferenceDestroy)
NOTHING(cublasLtMatmulPreferenceSetAttribute) NOTHING(cudnnDestroyTensorDescriptor)
NOTHING(cudnnSetStream) NOTHING(cudnnSetTensorNdDescriptor) COUNTED(cublasGemmEx)
COUNTED(cublasLtMatmul) COUNTED(cudnnBackendExecute) SECOND(cublasGetMathMode, 0)
int cudnnGetStream(void*, void** stream) { return *stream = nullptr, 0; }
int cublasLtMatmulAlgoGetHeuristic(P, P, P, P, P, P, P, int, char* result, int* found) {
  return memset(result, 0, 64), *found = 1, 0;
}
NOTHING(cudnnBackendFinalize) NOTHING(cudnnBackendSetAttribute)
int cudnnBackendCreateDescriptor(int, void** made) { return *made = new char[8], 0; }
int cudnnBackendDestroyDescriptor(char* made) { return delete[] made, 0; }
int cudnnBackendGetAttribute(void*, int what, int type, long, long* found, long* out) {
  bool bytes = out && (what == 402 || what == 1301);  // of a plan, of an operation
  if (bytes && type != 15) *out = 0;
  if (found) *found = type == 15 || bytes || what == 202;
  return 0;
}
COUNTED(cudnnBatchNormalizationForwardInference)
COUNTED(cudnnBatchNormalizationForwardTrainingEx) COUNTED(cudnnBatchNormalizationBackwardEx)
NO_BYTES(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize, P, int, int, P, P, P, P, P)
NO_BYTES(cudnnGetBatchNormalizationTrainingExReserveSpaceSize, P, int, int, P, P)
NO_BYTES(cudnnGetBatchNormalizationBackwardExWorkspaceSize, P, int, int, P, P, P, P, P, P, P)

// NCCL.
int ncclGetUniqueId(Id* id) { return getentropy(id, sizeof *id); }
int ncclCommInitRankConfig(Group** made, int size, Id id, int rank) {
  char name[50];
  snprintf(name, sizeof name, "/rehearsal-%lx", *(long*)id.bytes);
  int file = shm_open(name, O_RDWR | O_CREAT, 0600);
  size_t bytes = 4096 + size * PART;
  if (ftruncate(file, bytes)) return 2;
  char* all = (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  *made = new Group{rank, size, (Shared*)all, all + 4096};
  meet(*made);
  return shm_unlink(name), 0;
}
SECOND(ncclCommGetAsyncError, network_error ? 6 : 0)  // ncclRemoteError
int ncclAllReduce(const void* in, char* out, size_t n, int type, int, Group* group) {
  count("ncclAllReduce");
  if (hanging) return 0;
  return exchange(group, in, n * WIDTH[type], [&](int r, char* part, size_t at, size_t size) {
    auto sum = type == 8 /* float64 */ ? add<double> : add<float>;
    r ? sum(out + at, part, size) : (void)memcpy(out + at, part, size);
  });
}
int ncclBroadcast(const void* in, char* out, size_t n, int type, int root, Group* group) {
  return exchange(group, in, n * WIDTH[type], [&](int r, char* part, size_t at, size_t size) {
    if (r == root) memcpy(out + at, part, size);
  });
}
int ncclAllGather(const void* in, char* out, size_t n, int type, Group* group) {
  size_t mine = n * WIDTH[type];
  return exchange(group, in, mine, [&](int r, char* part, size_t at, size_t size) {
    memcpy(out + r * mine + at, part, size);
  });
}
int ncclReduceScatter(const char* in, char* out, size_t n, int type, int, Group* group) {
  size_t mine = n * WIDTH[type];
  for (int part = 0; part < group->size; part++)
    exchange(group, in + part * mine, mine, [&](int r, char* from, size_t at, size_t size) {
      if (part != group->rank) return;
      r ? add<float>(out + at, from, size) : (void)memcpy(out + at, from, size);
    });
  return 0;
}
// Between two processes.
int ncclSend(const void* in, size_t n, int type, int, Group* group) {
  return exchange(group, in, n * WIDTH[type], [](int, char*, size_t, size_t) {});
}
int ncclRecv(char* out, size_t n, int type, int sender, Group* group) {
  return exchange(group, out, n * WIDTH[type], [&](int r, char* part, size_t at, size_t size) {
    if (r == sender) memcpy(out + at, part, size);
  });
}
// nn.DataParallel exchanges among the devices of one process: that is dropped.
NOTHING(ncclCommInitAll) NOTHING(ncclBcast) NOTHING(ncclReduce) NOTHING(ncclCommDestroy)
NOTHING(ncclCommFinalize) NOTHING(ncclCommRegister) NOTHING(ncclCommDeregister)
NOTHING(ncclCommAbort) NOTHING(ncclGroupStart) NOTHING(ncclGroupEnd)

int ncclCommUserRank(Group* group, int* rank) { return *rank = group->rank, 0; }
int ncclCommCount(Group* group, int* size) { return *size = group->size, 0; }
const char* ncclGetErrorString(int) { return "rehearsed error of the network"; }
const char* ncclGetLastError() { return ""; }
}
