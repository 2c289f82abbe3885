/*
 * Objects of DevX with several handles (rdma-core 63). Exit status 0 if all was as
 * it should be, also with a libmlx5 that has no such functions.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <endian.h>
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdlib.h>

#include "check.h"

#define ALLOC_Q_COUNTER 0x771
#define QUERY_Q_COUNTER 0x773

static struct {
	uint32_t var, umem, object;
} sizes;
static void (*get_sizes)(void *, size_t);
static int (*export_object)(struct mlx5dv_devx_obj *, void *);
static struct mlx5dv_devx_obj *(*import_object)(struct ibv_context *, void *);
static void (*unimport_object)(struct mlx5dv_devx_obj *);
static int (*export_memory)(struct mlx5dv_devx_umem *, void *);
static struct mlx5dv_devx_umem *(*import_memory)(struct ibv_context *, void *);
static void (*unimport_memory)(struct mlx5dv_devx_umem *);

static void *function(const char *name)
{
	void *found = dlsym(RTLD_DEFAULT, name);

	CHECK(found);
	return found;
}

static int query(struct mlx5dv_devx_obj *counters, unsigned int set)
{
	uint32_t in[8] = { htobe32(QUERY_Q_COUNTER << 16) }, out[64];

	in[7] = htobe32(set);
	return mlx5dv_devx_obj_query(counters, in, sizeof(in), out, sizeof(out));
}

static void objects(struct ibv_context *context)
{
	uint32_t in[8] = { htobe32(ALLOC_Q_COUNTER << 16) }, out[8];
	struct mlx5dv_devx_obj *first, *second;
	char *data = malloc(sizes.object);
	unsigned int set;

	first = mlx5dv_devx_obj_create(context, in, sizeof(in), out, sizeof(out));
	CHECK(data && first);
	set = be32toh(out[2]) & 0xff;
	memset(data, 0x5a, sizes.object);
	CHECK(!export_object(first, data));
	second = import_object(context, data);
	CHECK(second && second != first);
	CHECK(!query(first, set) && !query(second, set));
	/* The object stays. */
	unimport_object(second);
	CHECK(!query(first, set));
	second = import_object(context, data);
	CHECK(second);
	CHECK(!mlx5dv_devx_obj_destroy(second));
	CHECK(query(first, set));
	unimport_object(first);
	free(data);
}

static void memory(struct ibv_context *context)
{
	void *pages = aligned_alloc(4096, 4096), *data = malloc(sizes.umem);
	struct mlx5dv_devx_umem *first, *second;

	CHECK(pages && data);
	first = mlx5dv_devx_umem_reg(context, pages, 4096, IBV_ACCESS_LOCAL_WRITE);
	CHECK(first);
	CHECK(!export_memory(first, data));
	second = import_memory(context, data);
	CHECK(second && second != first && second->umem_id == first->umem_id);
	unimport_memory(second);
	second = import_memory(context, data);
	CHECK(second);
	CHECK(!mlx5dv_devx_umem_dereg(second));
	CHECK(mlx5dv_devx_umem_dereg(first));
	unimport_memory(first);
	free(data);
	free(pages);
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context;

	CHECK(list && list[0]);
	context = ibv_open_device(list[0]);
	CHECK(context);
	if (!dlsym(RTLD_DEFAULT, "mlx5dv_devx_obj_export")) {
		puts("well");
		return 0;
	}
	get_sizes = function("_mlx5dv_get_export_sizes");
	export_object = function("mlx5dv_devx_obj_export");
	import_object = function("mlx5dv_devx_obj_import");
	unimport_object = function("mlx5dv_devx_obj_unimport");
	export_memory = function("mlx5dv_devx_umem_export");
	import_memory = function("mlx5dv_devx_umem_import");
	unimport_memory = function("mlx5dv_devx_umem_unimport");
	/* As much as the program's header has. */
	memset(&sizes, 0x5a, sizeof(sizes));
	get_sizes(&sizes, 8);
	CHECK(sizes.var == 24 && sizes.umem == 8 && sizes.object == 0x5a5a5a5a);
	get_sizes(&sizes, sizeof(sizes));
	CHECK(sizes.var == 24 && sizes.umem == 8 && sizes.object == 32);
	objects(context);
	memory(context);
	CHECK(!ibv_close_device(context));
	puts("well");
	return 0;
}
