"""Several devices, one result: joining a world, and the strategies none, dp, ddp and fsdp."""
