"""Uses trained weights elsewhere: in torchvision's model, and in one file for other programs.

$ python docs/use_weights.py
"""

import torch
from torchvision.models import resnet50

checkpoint = torch.load("checkpoints/model_best.pth", weights_only=True, map_location="cpu")
net = resnet50(num_classes=1000).eval()
net.load_state_dict(checkpoint["state_dict"])
images = torch.zeros(2, 3, 224, 224)  # an example: the file then takes any number of images
batch = torch.export.Dim.DYNAMIC
program = torch.export.export(net, (images,), dynamic_shapes=[{0: batch}])
torch.export.save(program, "resnet50.pt2")
