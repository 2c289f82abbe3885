/*
 * Regions of DMA buffers: of a memfd, and of udmabuf where the system has it. Prints "well".
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <linux/udmabuf.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#include "check.h"
#include "loopback.h"

#define PAGE ((size_t)sysconf(_SC_PAGESIZE))
#define LENGTH (4 * PAGE)
#define ACCESS (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)
#define IOVA (0x5000000000 + 64)

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *qp;

static int memory_file(int seals)
{
	int fd = memfd_create("buffer", MFD_ALLOW_SEALING);

	CHECK(fd >= 0 && !ftruncate(fd, LENGTH) && !fcntl(fd, F_ADD_SEALS, seals));
	return fd;
}

static void refuses(int fd, uint64_t offset, size_t length, uint64_t iova, int access, int error)
{
	errno = 0;
	CHECK(!ibv_reg_dmabuf_mr(pd, offset, length, iova, fd, access) && errno == error);
}

/* Writes to a region of the buffer but for its first page and 64 bytes. */
static void use(int fd)
{
	char *seen = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	size_t length = LENGTH - PAGE - 64;
	char *source = malloc(length);
	struct ibv_mr *mr, *from;
	struct ibv_wc wc;
	int got;

	CHECK(seen != MAP_FAILED && source);
	refuses(fd, PAGE, LENGTH, IOVA - 64, ACCESS, EINVAL);
	refuses(fd, PAGE, 0, IOVA - 64, ACCESS, EINVAL);
	refuses(fd, UINT64_MAX - PAGE + 1, 2 * PAGE, IOVA - 64, ACCESS, EINVAL);
	refuses(fd, PAGE, PAGE, IOVA, ACCESS, EINVAL);
	refuses(fd, PAGE, PAGE, IOVA - 64, IBV_ACCESS_REMOTE_WRITE, EINVAL);
	refuses(fd, PAGE, PAGE, IOVA - 64, ACCESS | IBV_ACCESS_ON_DEMAND, EINVAL);
	CHECK((mr = ibv_reg_dmabuf_mr(pd, PAGE + 64, length, IOVA, fd, ACCESS)));
	/* The region keeps the buffer. */
	CHECK(!close(fd));
	CHECK((from = ibv_reg_mr(pd, source, length, 0)));
	for (int times = 1; times < 4; times++) {
		struct ibv_sge sge = { (uintptr_t)source, length, from->lkey };
		struct ibv_send_wr *bad, wr = {
			.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
			.send_flags = IBV_SEND_SIGNALED, .wr.rdma = { IOVA, mr->rkey },
		};

		memset(source, times, length);
		CHECK(!ibv_post_send(qp, &wr, &bad));
		while (!(got = ibv_poll_cq(cq, 1, &wc)))
			;
		CHECK(got == 1 && !wc.status);
		CHECK(!memcmp(source, seen + PAGE + 64, length) && !seen[PAGE + 63]);
	}
	CHECK(!ibv_dereg_mr(mr) && !ibv_dereg_mr(from) && !munmap(seen, LENGTH));
	free(source);
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct udmabuf_create create;
	int fd, system, ends[2];

	CHECK(list && *list && (context = ibv_open_device(*list)));
	CHECK((pd = ibv_alloc_pd(context)) && (cq = ibv_create_cq(context, 16, NULL, NULL, 0)));
	qp = ibv_create_qp(pd, &(struct ibv_qp_init_attr){
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 8, 8, 1, 1 } });
	CHECK(qp);
	connect_to_itself(qp, (struct ibv_qp_attr){
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE, .min_rnr_timer = 12, .timeout = 14,
		.retry_cnt = 7, .rnr_retry = 7 });
	use(memory_file(F_SEAL_SHRINK));
	/* Other files are not buffers. */
	CHECK(!pipe(ends));
	refuses(ends[0], 0, PAGE, 0, ACCESS, EINVAL);
	refuses(fd = memory_file(0), 0, PAGE, 0, ACCESS, EINVAL);
	CHECK(!close(fd));
	refuses(fd, 0, PAGE, 0, ACCESS, EBADF);
	refuses(-1, 0, PAGE, 0, ACCESS, EBADF);
	if ((system = open("/dev/udmabuf", O_RDWR)) >= 0) {
		create = (struct udmabuf_create){ .memfd = memory_file(F_SEAL_SHRINK),
						  .size = LENGTH };
		CHECK((fd = ioctl(system, UDMABUF_CREATE, &create)) >= 0);
		use(fd);
	}
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd));
	CHECK(!ibv_close_device(context));
	puts("well");
	return 0;
}
