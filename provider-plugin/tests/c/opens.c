/*
 * Opens the first device, and says which file serves it. Compiled with
 * -DLINKED it is linked to libmlx5 as well, as perftest is.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <string.h>

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context;
	Dl_info info;

	if (!list || !list[0]) {
		puts("no device");
		return 1;
	}
	context = ibv_open_device(list[0]);
	if (!context) {
		perror("ibv_open_device");
		return 1;
	}
	if (!dladdr((void *)context->ops.poll_cq, &info))
		return 1;
	puts(info.dli_fname);
#ifdef LINKED
	/* The provider that serves the device answers. */
	printf("mlx5dv: %d\n", mlx5dv_is_supported(list[0]));
	struct mlx5dv_context offers;

	memset(&offers, 0x5a, sizeof(offers));
	offers.comp_mask = MLX5DV_CONTEXT_MASK_DYN_BFREGS;
	int answer = mlx5dv_query_device(context, &offers);

	printf("query: %d, %d offered\n", answer, offers.comp_mask != 0);
	if (offers.dc_odp_caps != 0x5a5a5a5a)
		puts("written beyond what was asked for");
#endif
	return 0;
}
