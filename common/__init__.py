"""What every script needs and no strategy changes."""

from .checkpoint import check_same, load_checkpoint, open_folder, restore, save_checkpoint
from .data import DIGITS, IMAGENET, ImageFolder, Seeded, TrainSampler, image_folders, make_loader
from .errors import ArgumentParser, at_least, end_on_error, user_errors
from .metrics import AverageMeter, ProgressMeter, accuracy, gather, preflight, reduce_mean
from .model import build_model
from .prefetcher import Prefetcher
from .process import Stop, die_with_parent, own_cores, pick_device, seed_step
from .records import add_curves, new_file, save_predictions
from .rendezvous import exchange, fresh_store, meeting_point, open_store
from .spawn import child, supervise
