"""Class folders, which --data takes, out of other layouts of images: as links, without copies.

Keep the function of your layout, and write your paths:

$ python docs/class_folders.py
"""

import csv
from pathlib import Path


def lines_of(path):
    return Path(path).read_text("utf-8-sig").splitlines()  # Excel writes a mark at its beginning


def link(pairs, folder):
    """folder/CLASS/FILE for each (file, class)."""
    for file, name in pairs:
        Path(folder, name).mkdir(parents=True, exist_ok=True)
        Path(folder, name, Path(file).name).symlink_to(Path(file).resolve())


def kaggle(root, out):
    """ILSVRC from Kaggle: train/ has class folders already, val/ has none."""
    Path(out).mkdir(parents=True, exist_ok=True)
    Path(out, "train").symlink_to(Path(root, "ILSVRC/Data/CLS-LOC/train").resolve())
    images = Path(root, "ILSVRC/Data/CLS-LOC/val")
    for row in csv.DictReader(lines_of(f"{root}/LOC_val_solution.csv")):
        label = row["PredictionString"].split()[0]  # before the first box
        link([(images / f"{row['ImageId']}.JPEG", label)], f"{out}/val")


def tiny_imagenet(root, out):
    """Tiny ImageNet: train/CLASS/images/ and val_annotations.txt."""
    link([(file, file.parts[-3]) for file in Path(root).glob("train/*/images/*")], f"{out}/train")
    for line in lines_of(f"{root}/val/val_annotations.txt"):
        name, label = line.split("\t")[:2]  # a box follows
        link([(f"{root}/val/images/{name}", label)], f"{out}/val")


def labels_in_a_csv(table, images, folder):
    """A CSV with the columns file and label."""
    rows = csv.DictReader(lines_of(table))
    link([(f"{images}/{row['file']}", row["label"]) for row in rows], folder)


def parquet(files, folder):
    """Hugging Face's parquet files, which hold the images: these are written. Needs pyarrow."""
    from pyarrow.parquet import ParquetFile

    for file in files:
        rows = (row for part in ParquetFile(file).iter_batches(100) for row in part.to_pylist())
        for number, row in enumerate(rows):
            place = Path(folder, f"{row['label']:04}")  # sorted as numbers, too
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{Path(file).stem}-{number}.jpg").write_bytes(row["image"]["bytes"])


if __name__ == "__main__":
    tiny_imagenet("tiny-imagenet-200", "data/tiny")
