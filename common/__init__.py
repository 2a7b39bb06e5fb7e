"""Data loading, prefetching, meters and reduce_mean; this folder can be copied alone.

images      folders of images as data sets: where an image is read, cropped and mirrored
decode      from the bytes of an image file to pixels
loader      the order of the images, the workers that read them, and their random numbers
batches     how images become a batch, and how that comes from a worker to the training process
prefetcher  from batches in host memory to batches on the device, images normalised
metrics     AverageMeter, accuracy and reduce_mean
"""
