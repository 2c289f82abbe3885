#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define CHECK(x, what) do { if (!(x)) { fprintf(stderr, "rank %d: wrong %s, line %d\n", rank, what, __LINE__); MPI_Abort(MPI_COMM_WORLD, 1); } } while (0)
static int rank, size;
/* Every operation once; each rank checks what it receives. */
static void run(int print) {
    /* ring, several sizes */
    for (long n = 1; n <= 1 << 20; n *= 8) {
        unsigned char *a = malloc(n), *b = calloc(n, 1);
        for (long i = 0; i < n; i++) a[i] = (unsigned char)(i * 7 + rank + n);
        MPI_Sendrecv(a, n, MPI_BYTE, (rank + 1) % size, 1, b, n, MPI_BYTE, (rank + size - 1) % size, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        int from = (rank + size - 1) % size;
        for (long i = 0; i < n; i++) CHECK(b[i] == (unsigned char)(i * 7 + from + n), "ring");
        free(a); free(b);
    }
    for (int n = 1; n <= 65536; n *= 16) {
        int *a = malloc(n * sizeof *a), *b = malloc(n * sizeof *a * size), *c = malloc(n * sizeof *a * size);
        for (int i = 0; i < n; i++) a[i] = i + rank;
        MPI_Allreduce(a, b, n, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
        for (int i = 0; i < n; i++) CHECK(b[i] == size * i + size * (size - 1) / 2, "allreduce");
        MPI_Allgather(a, n, MPI_INT, b, n, MPI_INT, MPI_COMM_WORLD);
        for (int r = 0; r < size; r++) for (int i = 0; i < n; i++) CHECK(b[r * n + i] == i + r, "allgather");
        for (int r = 0; r < size; r++) for (int i = 0; i < n; i++) c[r * n + i] = rank * 1000 + r + i;
        MPI_Alltoall(c, n, MPI_INT, b, n, MPI_INT, MPI_COMM_WORLD);
        for (int r = 0; r < size; r++) for (int i = 0; i < n; i++) CHECK(b[r * n + i] == r * 1000 + rank + i, "alltoall");
        for (int i = 0; i < n; i++) a[i] = rank == size - 1 ? i * 3 : -1;
        MPI_Bcast(a, n, MPI_INT, size - 1, MPI_COMM_WORLD);
        for (int i = 0; i < n; i++) CHECK(a[i] == i * 3, "bcast");
        MPI_Barrier(MPI_COMM_WORLD);
        free(a); free(b); free(c);
    }
    /* one-sided */
    int *base; MPI_Win win;
    MPI_Win_allocate(1024 * sizeof(int), sizeof(int), MPI_INFO_NULL, MPI_COMM_WORLD, &base, &win);
    for (int i = 0; i < 1024; i++) base[i] = -1;
    MPI_Win_fence(0, win);
    int mine[1024]; for (int i = 0; i < 1024; i++) mine[i] = rank * 5000 + i;
    MPI_Put(mine, 1024, MPI_INT, (rank + 1) % size, 0, 1024, MPI_INT, win);
    MPI_Win_fence(0, win);
    for (int i = 0; i < 1024; i++) CHECK(base[i] == (rank + size - 1) % size * 5000 + i, "put");
    MPI_Win_free(&win);
    /* latency and bandwidth between 0 and 1 */
    for (int n = 8; n <= 65536 && size > 1; n *= 8192) {
        char *m = calloc(n, 1); int rounds = 100;
        MPI_Barrier(MPI_COMM_WORLD);
        double t = MPI_Wtime();
        if (rank < 2) for (int i = 0; i < rounds; i++) {
            if (rank == 0) { MPI_Send(m, n, MPI_BYTE, 1, 2, MPI_COMM_WORLD); MPI_Recv(m, n, MPI_BYTE, 1, 2, MPI_COMM_WORLD, MPI_STATUS_IGNORE); }
            else { MPI_Recv(m, n, MPI_BYTE, 0, 2, MPI_COMM_WORLD, MPI_STATUS_IGNORE); MPI_Send(m, n, MPI_BYTE, 0, 2, MPI_COMM_WORLD); }
        }
        t = MPI_Wtime() - t;
        if (rank == 0 && print) printf("%d bytes: %.1f us one way\n", n, t / rounds / 2 * 1e6);
        MPI_Barrier(MPI_COMM_WORLD); free(m);
    }
}
/* The argument is for how many seconds; without one it runs once. */
int main(int argc, char **argv) {
    long rounds = 0; int more;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank); MPI_Comm_size(MPI_COMM_WORLD, &size);
    double end = MPI_Wtime() + (argc > 1 ? atof(argv[1]) : 0);
    do {
        run(rounds++ == 0);
        more = MPI_Wtime() < end;
        MPI_Bcast(&more, 1, MPI_INT, 0, MPI_COMM_WORLD);
    } while (more);
    if (rank == 0) printf("mpi: %d ranks, %ld rounds, all right\n", size, rounds);
    MPI_Finalize();
    return 0;
}
