// One MPI rank of benchmarks/collectives.py. Waits for commands "kind bytes rounds" on the FIFO
// <folder>/in.<rank>, times that many calls, and writes the microseconds of each to out.<rank>.
#define _GNU_SOURCE
#include <mpi.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void call(const char *kind, const void *in, void *out, int bytes, int n) {
  if (!strcmp(kind, "all_reduce"))
    MPI_Allreduce(in, out, bytes / 4, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  else if (!strcmp(kind, "all_gather"))
    MPI_Allgather(in, bytes, MPI_BYTE, out, bytes, MPI_BYTE, MPI_COMM_WORLD);
  else if (!strcmp(kind, "reduce_scatter"))
    MPI_Reduce_scatter_block(in, out, bytes / 4 / n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  else if (!strcmp(kind, "all_to_all"))
    MPI_Alltoall(in, bytes / n, MPI_BYTE, out, bytes / n, MPI_BYTE, MPI_COMM_WORLD);
  else if (!strcmp(kind, "broadcast"))
    MPI_Bcast(out, bytes, MPI_BYTE, 0, MPI_COMM_WORLD);
  else
    MPI_Barrier(MPI_COMM_WORLD);
}

int main(int argc, char **argv) {
  int rank, n, bytes, rounds;
  char path[4096], kind[64];
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &n);
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  CPU_SET(rank % atoi(argv[2]), &cpus);
  sched_setaffinity(0, sizeof cpus, &cpus);
  snprintf(path, sizeof path, "%s/in.%d", argv[1], rank);
  FILE *in_pipe = fopen(path, "r");
  snprintf(path, sizeof path, "%s/out.%d", argv[1], rank);
  FILE *out_pipe = fopen(path, "w");
  while (fscanf(in_pipe, "%63s %d %d", kind, &bytes, &rounds) == 3) {
    size_t room = (size_t)bytes * n + 64;
    float *in = aligned_alloc(64, (room + 63) / 64 * 64), *out = aligned_alloc(64, (room + 63) / 64 * 64);
    memset(in, 0, room);
    memset(out, 0, room);
    for (int i = 0; i < rounds; i++) {
      double start = MPI_Wtime();
      call(kind, in, out, bytes, n);
      fprintf(out_pipe, "%.3f ", (MPI_Wtime() - start) * 1e6);
    }
    fprintf(out_pipe, "\n");
    fflush(out_pipe);
    free(in);
    free(out);
  }
  MPI_Finalize();
  return 0;
}
